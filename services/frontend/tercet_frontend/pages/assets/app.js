// The page: what belongs together is put together here, and what the person does is sent where it belongs.

import { apiKey, listModels } from './api.js';
import { announce, button, download, element, fitHeight, toast } from './dom.js';
import { KeyDialog, pageStorage, themeSwitch } from './page.js';
import { Run } from './run.js';
import { Settings } from './settings.js';
import { Sidebar } from './sidebar.js';
import { checkedParams, newConversation, Store, titleOf } from './store.js';
import { Thread } from './thread.js';

const STARTERS = [
  'Explain how rainbows form, in three sentences',
  'Write a tercet about the sea',
  'What is the capital of France?',
  'Give me five names for a bakery',
];
const SAVE_EVERY_MS = 1_000;
const RETRY_MS = 1_500;
const RETRY_MOST_MS = 10_000;

const $ = (id) => document.getElementById(id);

class App {
  constructor() {
    this.storage = pageStorage();
    this.store = new Store(this.storage);
    this.runs = new Map(); // conversation id → Run
    this.models = [];
    this.conversation = null;
    this.unsaved = new Set(); // runs whose last words are not stored yet
    this.warned = false;
    this.sidebar = new Sidebar($('conversations'), {
      open: (id) => this.open(id),
      rename: (id, title) => this.rename(id, title),
      remove: (id) => this.remove(id),
    });
    this.thread = new Thread($('thread'), $('scroll'), $('latest'), {
      edit: (index, text) => this.edit(index, text),
      retry: (index) => this.retry(index),
      key: () => this.keyDialog.open(),
    });
    this.settings = new Settings((system, params) => this.parametersChanged(system, params));
  }

  start() {
    this.listen();
    this.drawers();
    this.keyDialog = new KeyDialog(() => this.loadModels());
    $('set-key').addEventListener('click', () => this.keyDialog.open());
    themeSwitch(this.storage);
    for (const text of STARTERS) {
      document.querySelector('.starters').append(button(text, { onclick: () => this.send(text) }));
    }
    this.show(this.store.get(location.hash.slice(1)) ?? this.fresh());
    this.loadModels();
    setInterval(() => this.saveRunning(), SAVE_EVERY_MS);
    if (matchMedia('(pointer: fine)').matches) $('prompt').focus();
    if (!this.storage) toast('This browser keeps nothing for this page: conversations end with it.');
  }

  // ---------------------------------------------------------------------------------------------- conversations

  fresh() {
    return newConversation(this.defaults());
  }

  defaults() {
    try {
      const { system, params } = JSON.parse(this.storage?.getItem('tercet.defaults')) ?? {};
      return { system: typeof system === 'string' ? system : '', params: checkedParams(params) };
    } catch {
      return {};
    }
  }

  /** Shows a conversation, and says so in the address. */
  open(id) {
    const conversation = id ? this.store.get(id) : this.fresh();
    if (!conversation) return;
    history.pushState(null, '', id ? `#${id}` : location.pathname + location.search);
    this.show(conversation);
    this.closeDrawers();
    $('prompt').focus();
  }

  show(conversation) {
    this.conversation = conversation;
    this.settings.show(conversation);
    this.refresh();
  }

  /** Shows everything about the open conversation again. */
  refresh() {
    const { conversation } = this;
    this.thread.show(conversation, this.runs.get(conversation.id)?.message ?? null);
    $('empty').hidden = conversation.messages.length > 0;
    $('thread').hidden = !conversation.messages.length;
    $('title').textContent = conversation.title;
    document.title = conversation.messages.length ? `${conversation.title} · Tercet` : 'Tercet';
    this.showModels();
    this.showComposer();
    this.showList();
  }

  showList() {
    this.sidebar.show(this.store.all(), this.conversation.id, this.runs);
  }

  save(conversation) {
    if (this.store.save(conversation) || this.warned) return;
    this.warned = true;
    toast('The browser has no room left for conversations. Export them, then delete some.', {
      label: 'Export', run: () => this.export(),
    });
  }

  rename(id, title) {
    const conversation = this.store.get(id);
    if (conversation && title !== conversation.title) {
      Object.assign(conversation, { title, named: true });
      this.save(conversation);
    }
    this.refreshTitle();
    this.showList();
  }

  refreshTitle() {
    $('title').textContent = this.conversation.title;
    if (this.conversation.messages.length) document.title = `${this.conversation.title} · Tercet`;
  }

  remove(id) {
    const conversation = this.store.get(id);
    this.runs.get(id)?.stop();
    this.store.remove(id);
    if (this.conversation.id === id) this.open(null);
    this.showList();
    toast(`\u201c${conversation.title}\u201d was deleted.`, {
      label: 'Undo',
      run: () => {
        this.save(conversation);
        this.open(id);
      },
    });
  }

  export() {
    if (!this.store.all().length) return toast('There is no conversation yet.');
    return download(`tercet-${new Date().toISOString().slice(0, 10)}.json`, this.store.export());
  }

  async import(file) {
    try {
      const { added, kept, saved } = this.store.import(await file.text());
      const rest = kept ? ` ${kept} were here already.` : '';
      toast(saved ? `${added === 1 ? '1 conversation was' : `${added} conversations were`} added.${rest}` : 'The browser has no room for all of them.');
      this.show(this.store.get(this.conversation.id) ?? this.conversation);
    } catch (error) {
      toast(error.message);
    }
  }

  // ---------------------------------------------------------------------------------------------- asking

  send(text) {
    const { conversation } = this;
    if (!text.trim() || this.runs.has(conversation.id)) return;
    conversation.messages.push({ role: 'user', content: text });
    if (conversation.messages.length === 1) {
      if (!conversation.named) conversation.title = titleOf(text);
      history.pushState(null, '', `#${conversation.id}`);
    }
    this.answer();
  }

  edit(index, text) {
    this.cut(index, 'Later messages were dropped.', this.conversation.messages.length > index + 2);
    this.conversation.messages.push({ role: 'user', content: text });
    if (index === 0 && !this.conversation.named) this.conversation.title = titleOf(text);
    this.answer();
  }

  retry(index) {
    this.cut(index, 'Later messages were dropped.', this.conversation.messages.length > index + 1);
    this.answer();
  }

  /** Drops the messages from an index on; where that is more than was asked for, it can be undone. */
  cut(index, notice, undoable) {
    const { conversation } = this;
    this.runs.get(conversation.id)?.stop();
    this.runs.delete(conversation.id);
    const before = conversation.messages;
    conversation.messages = before.slice(0, index);
    if (!undoable) return;
    toast(notice, {
      label: 'Undo',
      run: () => {
        this.runs.get(conversation.id)?.stop();
        this.runs.delete(conversation.id);
        conversation.messages = before;
        this.save(conversation);
        if (this.conversation === conversation) this.refresh();
      },
    });
  }

  /** Asks for the next answer of the open conversation. */
  async answer() {
    const { conversation } = this;
    conversation.updated = Date.now();
    conversation.model = $('model').value || conversation.model;
    const run = new Run(conversation, this.models.length ? conversation.model : null, (changed) => this.grown(changed));
    this.runs.set(conversation.id, run);
    this.save(conversation);
    this.refresh();
    announce('The answer is being written.');
    await run.start();
    this.unsaved.delete(run);
    const current = this.runs.get(conversation.id) === run;
    if (current) this.runs.delete(conversation.id);
    // Deleted, or replaced by another attempt, while it ran: nobody asks for it any more.
    if (!current || !this.store.get(conversation.id)) return;
    conversation.updated = Date.now();
    this.save(conversation);
    if (this.conversation === conversation) {
      this.thread.update(run.message, false);
      this.showComposer();
    }
    const { error } = run.message;
    announce(error ? `${error.title}. ${error.message}` : 'The answer is complete.');
    this.showList();
  }

  grown(run) {
    this.unsaved.add(run);
    if (this.frame || this.conversation !== run.conversation) return;
    // What comes between two frames is drawn once.
    this.frame = requestAnimationFrame(() => {
      this.frame = null;
      const shown = this.runs.get(this.conversation.id);
      if (shown) this.thread.update(shown.message, true);
    });
  }

  saveRunning() {
    for (const run of this.unsaved) {
      if (this.runs.get(run.conversation.id) === run && this.store.get(run.conversation.id)) this.save(run.conversation);
    }
    this.unsaved.clear();
  }

  stop() {
    const run = this.runs.get(this.conversation.id);
    run?.stop();
    if (run) $('prompt').focus();
    return Boolean(run);
  }

  // ---------------------------------------------------------------------------------------------- the server

  async loadModels(delay = RETRY_MS) {
    clearTimeout(this.retrying);
    try {
      this.models = await listModels();
      this.notice(null);
    } catch (error) {
      this.models = [];
      if (error.status === 401) {
        this.notice(apiKey.get() ? 'The server does not accept this API key.' : 'This server asks for an API key.', {
          label: 'Enter a key', run: () => this.keyDialog.open(),
        });
      } else {
        const next = Math.min(delay * 1.5, RETRY_MOST_MS);
        this.notice(`${error.message} Trying again…`, { label: 'Now', run: () => this.loadModels() });
        this.retrying = setTimeout(() => this.loadModels(next), delay);
      }
    }
    this.showModels();
  }

  showModels() {
    const select = $('model');
    const names = this.models.map(({ id }) => id);
    const wanted = [this.conversation.model, this.storage?.getItem('tercet.model')].find((name) => names.includes(name));
    select.replaceChildren(...(names.length ? names : ['no model yet']).map((name) => element('option', {}, name)));
    select.value = wanted ?? select.options[0].value;
    select.disabled = names.length < 2;
    select.classList.toggle('single', names.length === 1);
    if (!names.length) select.options[0].value = '';
  }

  notice(text, action = null) {
    const box = $('notice');
    box.hidden = !text;
    if (!text) return;
    box.replaceChildren(element('span', {}, text));
    if (action) box.append(button(action.label, { class: 'quiet', onclick: action.run }));
  }

  parametersChanged(system, params) {
    Object.assign(this.conversation, { system, params });
    this.storage?.setItem('tercet.defaults', JSON.stringify({ system, params }));
    if (this.conversation.messages.length) this.save(this.conversation);
  }

  // ---------------------------------------------------------------------------------------------- the page

  showComposer() {
    const running = this.runs.has(this.conversation.id);
    $('stop').hidden = !running;
    $('send').hidden = running;
    $('send').disabled = !$('prompt').value.trim();
  }

  listen() {
    const prompt = $('prompt');
    const submit = () => {
      if (!prompt.value.trim() || this.runs.has(this.conversation.id)) return;
      const text = prompt.value;
      prompt.value = '';
      fitHeight(prompt);
      this.send(text);
    };
    prompt.addEventListener('input', () => {
      fitHeight(prompt);
      this.showComposer();
    });
    prompt.addEventListener('keydown', (event) => {
      // A touch keyboard has no Shift+Enter: there Enter breaks the line, and the button sends.
      if (event.key !== 'Enter' || event.shiftKey || event.isComposing || matchMedia('(pointer: coarse)').matches) return;
      event.preventDefault();
      submit();
    });
    $('composer').addEventListener('submit', (event) => {
      event.preventDefault();
      submit();
    });
    document.querySelector('.skip').addEventListener('click', (event) => {
      event.preventDefault(); // the address names the conversation
      prompt.focus();
    });
    $('stop').addEventListener('click', () => this.stop());
    $('new-chat').addEventListener('click', () => this.open(null));
    $('model').addEventListener('change', ({ target }) => {
      this.conversation.model = target.value;
      this.storage?.setItem('tercet.model', target.value);
    });
    $('export').addEventListener('click', () => this.export());
    $('import').addEventListener('click', () => $('import-file').click());
    $('import-file').addEventListener('change', ({ target }) => {
      if (target.files.length) this.import(target.files[0]);
      target.value = '';
    });
    document.addEventListener('keydown', (event) => {
      if (event.key !== 'Escape' || event.defaultPrevented || $('key-dialog').open) return;
      if (!this.closeDrawers()) this.stop();
    });
    addEventListener('popstate', () => this.show(this.store.get(location.hash.slice(1)) ?? this.fresh()));
    addEventListener('pagehide', () => this.saveRunning());
    addEventListener('online', () => this.models.length || this.loadModels());
    // Another tab has written.
    addEventListener('storage', ({ key }) => {
      this.store.refresh(key);
      const { id } = this.conversation;
      if (!this.runs.has(id) && (key === null || key.endsWith(id)) && this.store.get(id)) this.show(this.store.get(id));
      else this.showList();
    });
  }

  drawers() {
    const drawer = (name, opener, closer, first) => {
      const panel = $(name);
      const set = (open) => {
        panel.classList.toggle('open', open);
        panel.inert = !open && getComputedStyle(opener).display !== 'none';
        opener.setAttribute('aria-expanded', String(open));
        $('scrim').classList.toggle('shown', document.querySelector('#sidebar.open, #settings.open') !== null);
        if (open) first().focus();
        else if (panel.contains(document.activeElement)) opener.focus();
      };
      opener.addEventListener('click', () => set(!panel.classList.contains('open')));
      closer.addEventListener('click', () => {
        set(false);
        opener.focus();
      });
      return { panel, set };
    };
    const list = drawer('sidebar', $('open-sidebar'), $('close-sidebar'), () => $('new-chat'));
    const settings = drawer('settings', $('open-settings'), $('close-settings'), () => $('p-system'));
    this.panels = [list, settings];
    // On a narrow page the list is a drawer that is closed; on a wide one it is always there.
    const narrow = matchMedia('(max-width: 48rem)');
    const fit = () => list.set(false);
    narrow.addEventListener('change', fit);
    fit();
    settings.set(false);
    $('scrim').addEventListener('click', () => this.closeDrawers());
  }

  /** Closes what lies over the page; returns whether anything did. */
  closeDrawers() {
    const open = this.panels.filter(({ panel }) => panel.classList.contains('open') && getComputedStyle(panel).position === 'fixed');
    for (const { set } of open) set(false);
    return open.length > 0;
  }
}

new App().start();
