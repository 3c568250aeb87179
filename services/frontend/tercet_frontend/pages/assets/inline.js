// Markdown within a paragraph: emphasis, code, links. See markdown.js.

/** Levels of a tree at most. */
export const DEPTH = 32;

const MAX_TARGET = 2_000; // characters of a link's target
const MAX_ENCLOSED = 4_000; // characters of a formula
const PUNCTUATION = /^[!-/:-@[-`{-~]$/;
const ENTITY = /&(?:#(\d{1,7})|#[xX]([0-9a-fA-F]{1,6})|([a-zA-Z]{2,8}));/y;
const ENTITIES = {
  amp: '&', lt: '<', gt: '>', quot: '"', apos: "'", nbsp: '\u00a0', copy: '©', reg: '®', trade: '™', deg: '°',
  times: '×', middot: '·', bull: '•', hellip: '…', mdash: '—', ndash: '–', larr: '←', rarr: '→', euro: '€',
  lsquo: '‘', rsquo: '’', ldquo: '“', rdquo: '”',
};
const PLAIN = /[^\\`*_~[\]!<&\nh$]+/y;
const BREAK = /<br ?\/?>/iy;
const ANGLE_LINK = /<((?:https?:\/\/|mailto:)[^\s<>]*)>/iy;
const BARE_LINK = /https?:\/\/[^\s<>\u0000-\u001f]+/iy;

/**
 * Returns the inline nodes of a text:
 *   text {text} · code {text} · math {text} · break · strong, em, del {children} · link {href, children}
 * The `href` of a link is absolute and of a scheme that only shows something; other targets stay text.
 */
export function parseInline(text) {
  return new Inline(text).parse();
}

/** Returns a link's target as a URL if it is http, https or mailto, else null. */
export function safeTarget(target) {
  let url;
  try {
    url = new URL(target);
  } catch {
    return null;
  }
  return ['http:', 'https:', 'mailto:'].includes(url.protocol) ? url.href : null;
}

class Inline {
  constructor(source) {
    this.source = source;
    this.at = 0;
    // A doubly linked list of {node, before, after}, so that wrapping a stretch costs its length and nothing else.
    this.head = { node: null, before: null, after: null };
    this.tail = this.head;
    this.delimiters = null; // the last of a stack, linked by `below` and `above`
    this.brackets = []; // {item, image, below, at, active}
    this.ticks = backtickRuns(source);
  }

  parse() {
    const { source } = this;
    while (this.at < source.length) {
      switch (source[this.at]) {
        case '\\': this.escape(); break;
        case '`': this.code(); break;
        case '*': case '_': case '~': this.delimiter(); break;
        case '[': this.open(false); break;
        case '!': if (source[this.at + 1] === '[') this.open(true); else this.text(source[this.at], 1); break;
        case ']': this.close(); break;
        case '<': this.angle(); break;
        case '&': this.entity(); break;
        case '$': this.dollars(); break;
        case '\n': this.newline(); break;
        case 'h': this.bareLink(); break;
        default: this.plain();
      }
    }
    this.emphasize(null);
    return children(this.head.after);
  }

  append(node) {
    const item = { node, before: this.tail, after: null };
    this.tail.after = item;
    this.tail = item;
    return item;
  }

  text(text, length) {
    this.at += length;
    return this.append({ type: 'text', text });
  }

  plain() {
    PLAIN.lastIndex = this.at;
    const [run] = PLAIN.exec(this.source);
    this.text(run, run.length);
  }

  match(pattern) {
    pattern.lastIndex = this.at;
    return pattern.exec(this.source);
  }

  escape() {
    const next = this.source[this.at + 1];
    if (next === '(' || next === '[') {
      const end = this.find(next === '(' ? '\\)' : '\\]', this.at + 2);
      if (end >= 0) return this.math(this.at + 2, end, end + 2);
    }
    if (next === '\n') {
      this.at += 1;
      return this.newline();
    }
    if (next !== undefined && PUNCTUATION.test(next)) return this.text(next, 2);
    return this.text('\\', 1);
  }

  dollars() {
    if (this.source[this.at + 1] === '$') {
      const end = this.find('$$', this.at + 2);
      if (end > this.at + 2) return this.math(this.at + 2, end, end + 2);
      return this.text('$$', 2);
    }
    return this.text('$', 1);
  }

  /** Returns where a mark is next, or -1 where that is too far for what it would enclose. */
  find(mark, from) {
    const found = this.source.slice(from, from + MAX_ENCLOSED).indexOf(mark);
    return found < 0 ? -1 : from + found;
  }

  math(from, to, next) {
    this.append({ type: 'math', text: this.source.slice(from, to).trim() });
    this.at = next;
  }

  code() {
    let end = this.at;
    while (this.source[end] === '`') end += 1;
    const length = end - this.at;
    const runs = this.ticks.get(length);
    while (runs.length && runs.at(-1) < end) runs.pop();
    if (!runs.length) return this.text(this.source.slice(this.at, end), length);
    const close = runs.pop();
    let body = this.source.slice(end, close).replaceAll('\n', ' ');
    if (body.startsWith(' ') && body.endsWith(' ') && body.trim()) body = body.slice(1, -1);
    this.append({ type: 'code', text: body });
    this.at = close + length;
  }

  newline() {
    const last = this.tail.node;
    if (last?.type === 'text') last.text = last.text.trimEnd();
    this.append({ type: 'break' });
    this.at += 1;
    while (this.source[this.at] === ' ') this.at += 1;
  }

  entity() {
    const found = this.match(ENTITY);
    if (!found) return this.text('&', 1);
    const [whole, decimal, hex, name] = found;
    const code = decimal ? Number.parseInt(decimal, 10) : hex ? Number.parseInt(hex, 16) : 0;
    let text = name ? ENTITIES[name] : undefined;
    if (code > 0 && code <= 0x10ffff && !(code >= 0xd800 && code < 0xe000)) text = String.fromCodePoint(code);
    return this.text(text ?? whole, whole.length);
  }

  angle() {
    const line = this.match(BREAK);
    if (line) {
      this.append({ type: 'break' });
      this.at += line[0].length;
      return;
    }
    const link = this.match(ANGLE_LINK);
    const href = link && safeTarget(link[1]);
    if (!href) return this.text('<', 1);
    this.append({ type: 'link', href, children: [{ type: 'text', text: link[1].replace(/^mailto:/i, '') }] });
    this.at += link[0].length;
  }

  bareLink() {
    const before = this.source[this.at - 1];
    const found = before === undefined || !/[\p{L}\p{N}]/u.test(before) ? this.match(BARE_LINK) : null;
    if (!found || this.brackets.length) return this.text('h', 1);
    let url = found[0];
    let open = 0;
    for (const character of url) open += character === '(' ? 1 : character === ')' ? -1 : 0;
    // Punctuation at the end belongs to the sentence, and so does a parenthesis that the address did not open.
    for (;;) {
      const last = url.at(-1);
      if (last === ')' && open < 0) open += 1;
      else if (!/[.,;:!?'"*_~\]}|`\\]/.test(last)) break;
      url = url.slice(0, -1);
    }
    const href = safeTarget(url);
    if (!href) return this.text('h', 1);
    this.append({ type: 'link', href, children: [{ type: 'text', text: url }] });
    this.at += url.length;
  }

  // -------------------------------------------------------------------------------------------- links

  open(image) {
    const item = this.text(image ? '![' : '[', image ? 2 : 1);
    this.brackets.push({ item, image, below: this.delimiters, active: true });
  }

  close() {
    const opener = this.brackets.pop();
    const target = opener?.active ? this.target(this.at + 1) : null;
    if (!target) return this.text(']', 1);
    this.at = target.end;
    this.emphasize(opener.below);
    const { item } = opener;
    const inside = children(item.after);
    const href = safeTarget(target.href);
    this.tail = item;
    item.after = null;
    if (href) {
      item.node = { type: 'link', href, children: inside.length ? inside : [{ type: 'text', text: target.href }] };
      // A link holds no link.
      if (!opener.image) for (const bracket of this.brackets) if (!bracket.image) bracket.active = false;
    } else {
      item.node = { type: 'text', text: '' };
      for (const node of inside) this.append(node);
    }
    return undefined;
  }

  /** Returns {href, end} of "(target "title")" at a position, or null. */
  target(from) {
    const { source } = this;
    if (source[from] !== '(') return null;
    let at = from + 1;
    while (source[at] === ' ') at += 1;
    const limit = Math.min(source.length, at + MAX_TARGET);
    let href = '';
    if (source[at] === '<') {
      const end = source.slice(at, limit).search(/[>\n]/);
      if (end < 0 || source[at + end] !== '>') return null;
      href = source.slice(at + 1, at + end);
      at += end + 1;
    } else {
      let depth = 0;
      for (; at < limit && !/\s/.test(source[at]); at += 1) {
        if (source[at] === '\\' && PUNCTUATION.test(source[at + 1] ?? '')) at += 1;
        else if (source[at] === '(') depth += 1;
        else if (source[at] === ')' && --depth < 0) break;
        href += source[at];
      }
      if (depth > 0) return null;
    }
    while (source[at] === ' ' || source[at] === '\n') at += 1;
    if (source[at] === '"' || source[at] === "'") {
      const end = source.slice(at + 1, at + 1 + MAX_TARGET).indexOf(source[at]);
      if (end < 0) return null;
      at += end + 2;
      while (source[at] === ' ') at += 1;
    }
    return source[at] === ')' ? { href, end: at + 1 } : null;
  }

  // -------------------------------------------------------------------------------------------- emphasis

  delimiter() {
    const { source, at } = this;
    const mark = source[at];
    let end = at;
    while (source[end] === mark) end += 1;
    const length = end - at;
    const before = characterBefore(source, at);
    const after = characterAt(source, end);
    const item = this.text(source.slice(at, end), length);
    if (mark === '~' && length !== 2) return;
    const [spaceBefore, spaceAfter] = [/^\s?$/.test(before), /^\s?$/.test(after)];
    const [signBefore, signAfter] = [SIGN.test(before), SIGN.test(after)];
    // Where words are not set apart by spaces, a mark may stand between a sign and a letter.
    const left = !spaceAfter && (!signAfter || spaceBefore || signBefore || UNSPACED.test(before));
    const right = !spaceBefore && (!signBefore || spaceAfter || signAfter || UNSPACED.test(after));
    const delimiter = {
      item, mark, length, run: length, below: this.delimiters, above: null,
      opens: mark === '_' ? left && (!right || signBefore) : left,
      closes: mark === '_' ? right && (!left || signAfter) : right,
    };
    if (this.delimiters) this.delimiters.above = delimiter;
    this.delimiters = delimiter;
  }

  /** Pairs the delimiters above `bottom`: CommonMark's procedure "process emphasis". */
  emphasize(bottom) {
    const floors = new Map();
    let closer = this.delimiters;
    while (closer && closer.below !== bottom) closer = closer.below;
    if (this.delimiters === bottom) closer = null;
    while (closer) {
      if (!closer.closes) {
        closer = closer.above;
        continue;
      }
      const kind = `${closer.mark}${closer.opens}${closer.run % 3}`;
      const floor = floors.has(kind) ? floors.get(kind) : bottom;
      let opener = closer.below;
      while (opener !== bottom && opener !== floor && !pairs(opener, closer)) opener = opener.below;
      if (opener === bottom || opener === floor) {
        floors.set(kind, closer.below);
        const { above } = closer;
        if (!closer.opens) this.drop(closer);
        closer = above;
        continue;
      }
      const width = opener.mark === '~' || (opener.length >= 2 && closer.length >= 2) ? 2 : 1;
      wrap(opener, closer, width);
      opener.above = closer;
      closer.below = opener;
      if (!opener.length) this.drop(opener);
      if (!closer.length) {
        const { above } = closer;
        this.drop(closer);
        closer = above;
      }
    }
    this.delimiters = bottom;
    if (bottom) bottom.above = null;
  }

  drop(delimiter) {
    if (delimiter.below) delimiter.below.above = delimiter.above;
    if (delimiter.above) delimiter.above.below = delimiter.below;
    else this.delimiters = delimiter.below;
  }
}

const SIGN = /^[\p{P}\p{S}]$/u;
const UNSPACED = /^[\p{Script=Han}\p{Script=Hiragana}\p{Script=Katakana}\p{Script=Hangul}]$/u;

function characterAt(source, at) {
  const code = source.codePointAt(at);
  return code === undefined ? '' : String.fromCodePoint(code);
}

function characterBefore(source, at) {
  const low = source.charCodeAt(at - 1) & 0xfc00;
  return at === 0 ? '' : characterAt(source, low === 0xdc00 && at > 1 ? at - 2 : at - 1);
}

function pairs(opener, closer) {
  if (opener.mark !== closer.mark || !opener.opens) return false;
  const ambiguous = (closer.opens || opener.closes) && closer.run % 3 !== 0;
  return !(ambiguous && (opener.run + closer.run) % 3 === 0);
}

function wrap(opener, closer, width) {
  const inside = children(opener.item.after, closer.item);
  const depth = 1 + Math.max(0, ...levels(inside));
  opener.length -= width;
  closer.length -= width;
  opener.item.node.text = opener.item.node.text.slice(width);
  closer.item.node.text = closer.item.node.text.slice(width);
  const type = opener.mark === '~' ? 'del' : width === 2 ? 'strong' : 'em';
  // Nobody nests that deep to be read; as one text it costs nothing more.
  const node = depth > DEPTH ? { type: 'text', text: plainText(inside) } : { type, children: inside, depth };
  const item = { node, before: opener.item, after: closer.item };
  opener.item.after = item;
  closer.item.before = item;
}

function plainText(nodes) {
  return nodes.map((node) => node.text ?? (node.type === 'break' ? '\n' : plainText(node.children))).join('');
}

function levels(nodes) {
  return new Set(nodes.map((node) => node.depth ?? 0));
}

/** Returns the nodes from an item up to another; neighbouring texts become one, empty ones go. */
function children(from, end = null) {
  const nodes = [];
  for (let item = from; item !== end && item !== null; item = item.after) {
    const { node } = item;
    const last = nodes.at(-1);
    if (node.type !== 'text') nodes.push(node);
    else if (!node.text) continue;
    else if (last?.type === 'text') nodes[nodes.length - 1] = { type: 'text', text: last.text + node.text };
    else nodes.push(node);
  }
  return nodes;
}

/** Returns where runs of backticks begin, by their length; the last first, so that used ones are popped. */
function backtickRuns(source) {
  const runs = new Map();
  for (const found of source.matchAll(/`+/g)) {
    const { length } = found[0];
    if (!runs.has(length)) runs.set(length, []);
    runs.get(length).push(found.index);
  }
  for (const positions of runs.values()) positions.reverse();
  return runs;
}
