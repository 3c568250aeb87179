// The messages of the conversation that is looked at.

import { button, copyText, element, fitHeight, iconButton } from './dom.js';
import { MarkdownView } from './render.js';

const NOTES = {
  length: 'The answer ends here because its limit of tokens was reached. Raise \u201cMax tokens\u201d, or ask to go on.',
  stopped: 'Stopped.',
};

export class Thread {
  /** `actions`: edit(index, text), retry(index), key(). */
  constructor(root, scroll, latest, actions) {
    this.root = root;
    this.scroll = scroll;
    this.latest = latest;
    this.actions = actions;
    this.views = [];
    this.follows = true; // whether the view moves on with the text
    this.top = 0;
    scroll.addEventListener('scroll', () => this.scrolled(), { passive: true });
    latest.addEventListener('click', () => this.toEnd());
    new ResizeObserver(() => this.follow()).observe(root);
  }

  /** Shows a conversation; `running` is the message that still grows, if any. */
  show(conversation, running) {
    this.views = conversation.messages.map((message, index) =>
      message.role === 'user'
        ? new UserMessage(message, (text) => this.actions.edit(index, text))
        : new Answer(message, { retry: () => this.actions.retry(index), key: () => this.actions.key() }),
    );
    conversation.messages.forEach((message, index) => this.views[index].update(message, message === running));
    this.root.replaceChildren(...this.views.map((view) => view.node));
    this.root.setAttribute('aria-busy', String(running !== null));
    this.toEnd();
  }

  /** Shows what became of the last message. */
  update(message, busy) {
    this.views.at(-1).update(message, busy);
    this.root.setAttribute('aria-busy', String(busy));
    this.follow();
  }

  follow() {
    if (this.follows) this.scroll.scrollTop = this.scroll.scrollHeight;
    this.latest.hidden = this.follows;
  }

  toEnd() {
    this.follows = true;
    this.follow();
  }

  scrolled() {
    const { scrollTop, scrollHeight, clientHeight } = this.scroll;
    const away = scrollHeight - clientHeight - scrollTop;
    if (away < 24) this.follows = true;
    else if (scrollTop < this.top - 1) this.follows = false;
    this.top = scrollTop;
    this.latest.hidden = this.follows || away < 120;
  }
}

class UserMessage {
  constructor(message, send) {
    this.message = message;
    this.send = send;
    const copy = iconButton('copy', 'Copy', { onclick: () => copyText(message.content, copy) });
    this.edit = iconButton('edit', 'Edit and send again', { onclick: () => this.open() });
    this.shown = [
      element('div', { class: 'text' }, message.content),
      element('div', { class: 'actions' }, copy, this.edit),
    ];
    this.node = element('article', { class: 'message user', 'aria-label': 'Your message' }, ...this.shown);
  }

  update() {}

  open() {
    const area = element('textarea', { 'aria-label': 'Edit your message', rows: '1' });
    area.value = this.message.content;
    const submit = () => {
      if (area.value.trim()) this.send(area.value);
    };
    area.addEventListener('input', () => fitHeight(area));
    area.addEventListener('keydown', (event) => {
      if (event.key === 'Escape') {
        event.stopPropagation();
        this.close();
      } else if (event.key === 'Enter' && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        submit();
      }
    });
    const row = element(
      'div', { class: 'row' },
      button('Cancel', { class: 'quiet', onclick: () => this.close() }),
      button('Send again', { class: 'primary', onclick: submit }),
    );
    this.node.classList.add('editing');
    this.node.replaceChildren(element('div', { class: 'editor' }, area, row));
    fitHeight(area);
    area.focus();
    area.setSelectionRange(area.value.length, area.value.length);
  }

  close() {
    this.node.classList.remove('editing');
    this.node.replaceChildren(...this.shown);
    this.edit.focus();
  }
}

class Answer {
  constructor(message, actions) {
    this.message = message;
    this.actions = actions;
    this.body = element('div', { class: 'text md' });
    this.markdown = new MarkdownView(this.body);
    this.waiting = element('div', { class: 'waiting', 'aria-hidden': 'true' }, element('i'), element('i'), element('i'));
    this.summary = element('summary', {});
    this.thoughts = element('div', { class: 'body' });
    this.reasoning = element('details', { class: 'reasoning' }, this.summary, this.thoughts);
    this.note = element('p', { class: 'limit' });
    this.failure = element('div', { class: 'error' });
    this.stats = element('span', { class: 'stats' });
    this.copy = iconButton('copy', 'Copy', { onclick: () => copyText(this.message.content, this.copy) });
    this.retry = iconButton('retry', 'Answer again', { onclick: actions.retry });
    this.node = element(
      'article', { class: 'message assistant', 'aria-label': 'Answer' },
      this.reasoning, this.body, this.waiting, this.note, this.failure,
      element('div', { class: 'actions' }, this.copy, this.retry, this.stats),
    );
  }

  update(message, busy) {
    this.message = message;
    const { content, reasoning = '', error, stats } = message;
    const finish = message.finish ?? (busy ? null : 'stopped');
    this.node.classList.toggle('busy', busy);
    this.body.hidden = !content;
    this.markdown.update(content);
    this.waiting.hidden = !busy || Boolean(content || reasoning);
    this.reasoning.hidden = !reasoning;
    this.reasoning.classList.toggle('live', busy && !content);
    this.summary.textContent = busy && !content ? 'Thinking' : 'Thoughts';
    if (this.thoughts.textContent !== reasoning) this.thoughts.textContent = reasoning;
    this.note.textContent = NOTES[finish] ?? '';
    this.note.hidden = !NOTES[finish];
    this.copy.hidden = !content;
    this.stats.textContent = stats ? describeStats(stats) : '';
    this.fail(error);
  }

  fail(error) {
    this.failure.hidden = !error;
    this.retry.hidden = Boolean(error); // the notice has the same button
    if (!error || this.failure.hasChildNodes()) return;
    const buttons = element('div', { class: 'buttons' });
    if (error.status === 401) buttons.append(button('Enter a key', { class: 'quiet', onclick: this.actions.key }));
    buttons.append(button('Try again', { class: 'quiet', onclick: this.actions.retry }));
    this.failure.append(element('strong', {}, error.title), element('p', {}, error.message));
    if (error.advice) this.failure.append(element('p', {}, error.advice));
    this.failure.append(buttons);
  }
}

/** Returns "61 tokens · 34.2 per second · first after 0.18 s"; the rate needs at least two tokens. */
export function describeStats({ tokens, exact, seconds, first }) {
  const parts = [`${exact ? '' : '\u2248\u202f'}${tokens} ${tokens === 1 ? 'token' : 'tokens'}`];
  if (tokens > 1 && seconds > 0.005) parts.push(`${((tokens - 1) / seconds).toFixed(1)} per second`);
  parts.push(`first after ${first.toFixed(2)} s`);
  return parts.join(' \u00b7 ');
}
