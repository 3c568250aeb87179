// Conversations, kept in this browser and nowhere else; and as files, which `tercet chat` reads and writes too.
//
// A conversation: {id, title, named, created, updated (ms), model, system, params, messages}.
// A message: {role: 'user' | 'assistant', content, and for answers reasoning, finish, stats, error}.

const PREFIX = 'tercet.conversation.';
const FORMAT = 'tercet-chat';
const VERSION = 1;
const MAX_MESSAGES = 10_000;
const MAX_TITLE = 200;

/** Sampling parameters: what a field is called, and which numbers it takes. Empty ones are left to the server. */
export const PARAMETERS = [
  { name: 'temperature', label: 'Temperature', min: 0, max: 2, step: 0.05, whole: false },
  { name: 'top_p', label: 'Top p', min: 0.01, max: 1, step: 0.01, whole: false },
  { name: 'max_tokens', label: 'Max tokens', min: 1, max: 1_000_000, step: 1, whole: true },
  { name: 'seed', label: 'Seed', min: -(2 ** 53 - 1), max: 2 ** 53 - 1, step: 1, whole: true },
];

export function newConversation({ model = null, system = '', params = {} } = {}) {
  const now = Date.now();
  return { id: newId(), title: 'New conversation', named: false, created: now, updated: now, model, system, params, messages: [] };
}

function newId() {
  // randomUUID exists only with TLS or on localhost.
  return Array.from(crypto.getRandomValues(new Uint8Array(12)), (byte) => byte.toString(16).padStart(2, '0')).join('');
}

/** Returns what a conversation is called after its first message. */
export function titleOf(text) {
  const line = text.trim().split('\n', 1)[0].replace(/\s+/g, ' ');
  const characters = Array.from(line);
  return characters.length > 56 ? `${characters.slice(0, 55).join('').trimEnd()}…` : line || 'New conversation';
}

export class Store {
  /** Takes a Storage, or null where the browser has none to give. */
  constructor(storage) {
    this.storage = storage;
    this.conversations = new Map();
    this.load();
  }

  load() {
    this.conversations.clear();
    if (!this.storage) return;
    for (let index = 0; index < this.storage.length; index += 1) {
      const key = this.storage.key(index);
      if (key.startsWith(PREFIX)) this.read(key);
    }
  }

  /** Takes over what another tab has stored. */
  refresh(key) {
    if (key === null) this.load();
    else if (key.startsWith(PREFIX)) {
      this.conversations.delete(key.slice(PREFIX.length));
      this.read(key);
    }
  }

  read(key) {
    try {
      const conversation = checked(JSON.parse(this.storage.getItem(key)));
      if (PREFIX + conversation.id === key) this.conversations.set(conversation.id, conversation);
    } catch {
      // Not one of ours, or damaged: it is left where it is, and not shown.
    }
  }

  /** Returns all conversations, the latest first. */
  all() {
    return [...this.conversations.values()].sort((one, other) => other.updated - one.updated);
  }

  get(id) {
    return this.conversations.get(id) ?? null;
  }

  /** Keeps a conversation; returns whether it will outlive the page. */
  save(conversation) {
    this.conversations.set(conversation.id, conversation);
    try {
      this.storage.setItem(PREFIX + conversation.id, JSON.stringify(conversation));
      return true;
    } catch {
      return false;
    }
  }

  remove(id) {
    this.conversations.delete(id);
    this.storage?.removeItem(PREFIX + id);
  }

  /** Returns the text of a file with all conversations. */
  export() {
    return JSON.stringify({ format: FORMAT, version: VERSION, conversations: this.all() }, null, 2);
  }

  /**
   * Adds the conversations of a file; those that are here already are replaced where the file's are newer.
   * Returns {added, kept, saved}. Raises an Error with a sentence where the text is no such file; then nothing is added.
   */
  import(text) {
    const found = parseFile(text);
    let added = 0;
    let saved = true;
    for (const conversation of found) {
      const present = this.get(conversation.id);
      if (present && present.updated >= conversation.updated) continue;
      saved = this.save(conversation) && saved;
      added += 1;
    }
    return { added, kept: found.length - added, saved };
  }
}

/** Returns the conversations of a file's text. */
export function parseFile(text) {
  let file;
  try {
    file = JSON.parse(text);
  } catch {
    throw new Error('This file is not JSON.');
  }
  if (file?.format !== FORMAT || !Array.isArray(file.conversations)) {
    throw new Error('This file does not hold conversations of Tercet.');
  }
  if (file.version !== VERSION) throw new Error('This file was written by another version of Tercet.');
  return file.conversations.map((value, index) => {
    try {
      return checked(value);
    } catch (error) {
      throw new Error(`Conversation ${index + 1} of this file is damaged: ${error.message}`);
    }
  });
}

/** Returns a conversation with known fields only. Raises an Error naming what is wrong with it. */
function checked(value) {
  const { id, title, created, updated, messages } = value ?? {};
  require(typeof id === 'string' && /^[\w-]{1,64}$/.test(id), 'it has no id.');
  require(Array.isArray(messages) && messages.length <= MAX_MESSAGES, 'it has no messages.');
  return {
    id,
    title: text(title) ? title.slice(0, MAX_TITLE) : 'Conversation',
    named: value.named === true,
    created: time(created),
    updated: time(updated),
    model: text(value.model) ? value.model : null,
    system: text(value.system) ? value.system : '',
    params: checkedParams(value.params),
    messages: messages.map(checkedMessage),
  };
}

function checkedMessage(value) {
  require(['user', 'assistant'].includes(value?.role) && typeof value.content === 'string', 'a message has no text.');
  const message = { role: value.role, content: value.content };
  if (value.role === 'user') return message;
  if (text(value.reasoning)) message.reasoning = value.reasoning;
  if (text(value.finish)) message.finish = value.finish;
  const { stats, error } = value;
  if (stats && ['tokens', 'seconds', 'first'].every((name) => Number.isFinite(stats[name]))) {
    message.stats = { tokens: stats.tokens, seconds: stats.seconds, first: stats.first, exact: stats.exact === true };
  }
  if (error && text(error.title) && text(error.message)) {
    message.error = { title: error.title, message: error.message, advice: text(error.advice) ? error.advice : '' };
    if (Number.isInteger(error.status)) message.error.status = error.status;
  }
  return message;
}

/** Returns the parameters that are what they must be. */
export function checkedParams(value) {
  const params = {};
  for (const { name, min, max, whole } of PARAMETERS) {
    const number = value?.[name];
    if (Number.isFinite(number) && number >= min && number <= max && (!whole || Number.isInteger(number))) {
      params[name] = number;
    }
  }
  if (Array.isArray(value?.stop)) {
    const stop = value.stop.filter((item) => text(item)).slice(0, 16);
    if (stop.length) params.stop = stop;
  }
  return params;
}

function require(condition, sentence) {
  if (!condition) throw new Error(sentence);
}

function text(value) {
  return typeof value === 'string' && value !== '';
}

function time(value) {
  return Number.isFinite(value) ? value : Date.now();
}
