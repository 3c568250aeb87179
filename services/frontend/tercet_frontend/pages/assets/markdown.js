// Markdown to a tree, without a document: what a model writes is data until render.js builds nodes from it. This file finds
// the blocks, inline.js what is inside of their lines.
//
// CommonMark with tables, strikethrough and task lists, except what a chat has no use for: markup is shown as text,
// images are links (nothing is loaded from elsewhere), and every line break counts.
// Time is linear in the length of the text, and the tree is at most DEPTH levels deep, whatever the text is.

import { DEPTH } from './inline.js';

export { parseInline } from './inline.js';

const FENCE = /^( {0,3})(`{3,}|~{3,})[ \t]*(.*)$/;
const HEADING = /^ {0,3}(#{1,6})(?:[ \t]+(.*))?$/;
const RULE = /^ {0,3}([-*_])[ \t]*(?:\1[ \t]*){2,}$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])(?: +(.*)|)$/;
const NESTED_ITEM = /^( *)([-*+]|\d{1,9}[.)])(?: |$)/;
const TASK = /^\[([ xX])\] +(?=\S)/;
const BLANK = /^[ \t]*$/;

/**
 * Returns the blocks of a text. Each has a `type`, and top-level ones the `source` they were made of:
 *   paragraph {text} · heading {level, text} · code {language, text, open} · quote {blocks} · rule ·
 *   list {ordered, start, tight, items: [{blocks, checked}]} · table {align, head: [text], rows: [[text]]}
 * The inline text of blocks is left to parseInline.
 */
export function parseBlocks(text) {
  const lines = text.split(/\r\n|\n|\r/).map(expandTabs);
  return blocksOf(lines, 0, true);
}

function expandTabs(line) {
  if (!line.includes('\t')) return line;
  let column = 0;
  let at = 0;
  for (; at < line.length && (line[at] === ' ' || line[at] === '\t'); at += 1) {
    column += line[at] === '\t' ? 4 - (column % 4) : 1;
  }
  return ' '.repeat(column) + line.slice(at);
}

function blocksOf(lines, depth, top = false) {
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    if (BLANK.test(lines[at])) {
      at += 1;
      continue;
    }
    const from = at;
    const [block, next] = blockAt(lines, at, depth);
    at = next;
    if (top) block.source = lines.slice(from, next).join('\n');
    blocks.push(block);
  }
  return blocks;
}

function blockAt(lines, at, depth) {
  const line = lines[at];
  let found;
  if ((found = fenceOf(line))) return codeAt(lines, at, found);
  if (line.startsWith('    ')) return indentedAt(lines, at);
  if ((found = HEADING.exec(line))) {
    const text = (found[2] ?? '').trim().replace(/(^|[ \t])#+$/, '').trim();
    return [{ type: 'heading', level: found[1].length, text }, at + 1];
  }
  if (RULE.test(line)) return [{ type: 'rule' }, at + 1];
  if (depth < DEPTH) {
    if (QUOTE.test(line)) return quoteAt(lines, at, depth);
    if ((found = ITEM.exec(line))) return listAt(lines, at, depth, found);
  }
  if (startsTable(lines, at)) return tableAt(lines, at);
  return paragraphAt(lines, at, depth);
}

function fenceOf(line) {
  const found = FENCE.exec(line);
  // Backticks after backticks are a code span that happens to begin a line.
  return found && !(found[2][0] === '`' && found[3].includes('`')) ? found : null;
}

function codeAt(lines, at, [, indent, fence, info]) {
  const body = [];
  let next = at + 1;
  let open = true;
  for (; next < lines.length; next += 1) {
    const closing = /^ {0,3}(`{3,}|~{3,})[ \t]*$/.exec(lines[next]);
    if (closing && closing[1][0] === fence[0] && closing[1].length >= fence.length) {
      open = false;
      next += 1;
      break;
    }
    body.push(dedent(lines[next], indent.length));
  }
  const language = info.trim().split(/\s/, 1)[0].slice(0, 40);
  return [{ type: 'code', language, text: body.join('\n'), open }, next];
}

function indentedAt(lines, at) {
  let next = at;
  while (next < lines.length && (lines[next].startsWith('    ') || BLANK.test(lines[next]))) next += 1;
  while (BLANK.test(lines[next - 1])) next -= 1;
  const text = lines.slice(at, next).map((line) => dedent(line, 4)).join('\n');
  return [{ type: 'code', language: '', text, open: false }, next];
}

function dedent(line, columns) {
  let count = 0;
  while (count < columns && line[count] === ' ') count += 1;
  return line.slice(count);
}

function indentOf(line) {
  return line.length - line.trimStart().length;
}

function quoteAt(lines, at, depth) {
  const body = [];
  let next = at;
  for (; next < lines.length; next += 1) {
    if (QUOTE.test(lines[next])) body.push(lines[next].replace(QUOTE, ''));
    // A line without the mark goes on with the paragraph of the line before.
    else if (BLANK.test(lines[next]) || BLANK.test(body.at(-1)) || startsBlock(lines, next, depth)) break;
    else body.push(lines[next]);
  }
  return [{ type: 'quote', blocks: blocksOf(body, depth + 1) }, next];
}

function listAt(lines, at, depth, first) {
  const ordered = first[2].length > 1;
  const items = [];
  let loose = false;
  let next = at;
  let marker = first;
  while (marker && marker[2].length > 1 === ordered && !(RULE.test(lines[next]) && items.length)) {
    const base = marker[1].length;
    const content = marker[3] ?? '';
    const padding = content.length - content.trimStart().length;
    // The column at which the item's content begins; text that is indented further is an indented block inside it.
    const offset = base + marker[2].length + 1 + (padding < 4 ? padding : 0);
    const body = [padding < 4 ? content.trimStart() : content];
    next += 1;
    let blank = false;
    for (; next < lines.length; next += 1) {
      const line = lines[next];
      if (BLANK.test(line)) {
        if (blank && body.length === 1 && body[0] === '') break;
        body.push('');
        blank = true;
        continue;
      }
      const indent = indentOf(line);
      if (indent >= offset) body.push(line.slice(offset));
      // Two columns are enough for a list inside an item, also below "1.": that is what models write.
      else if (indent >= base + 2 && NESTED_ITEM.test(line)) body.push(line.slice(indent));
      else if (!blank && !startsBlock(lines, next, depth) && !NESTED_ITEM.test(line)) body.push(line.trimStart());
      else break;
      blank = false;
    }
    let trailing = 0;
    while (body.length > 1 && body.at(-1) === '') {
      body.pop();
      trailing += 1;
    }
    let checked = null;
    const task = TASK.exec(body[0]);
    if (task) {
      checked = task[1] !== ' ';
      body[0] = body[0].slice(task[0].length);
    }
    items.push({ blocks: blocksOf(body, depth + 1), checked });
    marker = next < lines.length ? ITEM.exec(lines[next]) : null;
    const goesOn = marker && marker[2].length > 1 === ordered;
    if ((trailing && goesOn) || separated(body)) loose = true;
  }
  const start = ordered ? Number.parseInt(first[2], 10) : 1;
  return [{ type: 'list', ordered, start, tight: !loose, items }, next];
}

/** Returns whether blank lines stand between an item's own blocks; those inside of code do not count. */
function separated(body) {
  let fence = null;
  for (let at = 0; at < body.length; at += 1) {
    const found = fenceOf(body[at]);
    if (found && (fence === null || (found[2][0] === fence[0] && found[2].length >= fence.length))) {
      fence = fence === null ? found[2] : null;
    } else if (fence === null && body[at] === '' && at > 0 && indentOf(body[at + 1] ?? '') === 0) {
      return !NESTED_ITEM.test(body[at + 1] ?? '');
    }
  }
  return false;
}

function startsBlock(lines, at, depth) {
  const line = lines[at];
  if (fenceOf(line) || HEADING.test(line) || RULE.test(line)) return true;
  if (depth >= DEPTH) return false;
  if (QUOTE.test(line)) return true;
  const item = ITEM.exec(line);
  // Within a paragraph, "1986." at the start of a line is a year more often than a list.
  return Boolean(item && item[3] && (item[2].length === 1 || Number.parseInt(item[2], 10) === 1));
}

function paragraphAt(lines, at, depth) {
  let next = at + 1;
  while (
    next < lines.length && !BLANK.test(lines[next]) && !startsBlock(lines, next, depth) && !startsTable(lines, next)
  ) {
    next += 1;
  }
  return [{ type: 'paragraph', text: lines.slice(at, next).map((line) => line.trimStart()).join('\n').trimEnd() }, next];
}

function startsTable(lines, at) {
  if (at + 1 >= lines.length || !lines[at].includes('|') || !/^[ \t|:-]+$/.test(lines[at + 1])) return false;
  const rule = cellsOf(lines[at + 1]);
  return rule.length > 0 && rule.every((cell) => /^:?-+:?$/.test(cell)) && cellsOf(lines[at]).length === rule.length;
}

function tableAt(lines, at) {
  const head = cellsOf(lines[at]);
  const align = cellsOf(lines[at + 1]).map((cell) => {
    const [left, right] = [cell.startsWith(':'), cell.endsWith(':')];
    return left && right ? 'center' : right ? 'right' : left ? 'left' : null;
  });
  const rows = [];
  let next = at + 2;
  for (; next < lines.length && lines[next].includes('|'); next += 1) {
    const cells = cellsOf(lines[next]).slice(0, head.length);
    while (cells.length < head.length) cells.push('');
    rows.push(cells);
  }
  return [{ type: 'table', align, head, rows }, next];
}

function cellsOf(line) {
  const cells = [];
  let cell = '';
  const row = line.trim();
  for (let at = row.startsWith('|') ? 1 : 0; at < row.length; at += 1) {
    if (row[at] === '\\' && row[at + 1] === '|') {
      cell += '|';
      at += 1;
    } else if (row[at] === '|') {
      cells.push(cell.trim());
      cell = '';
    } else {
      cell += row[at];
    }
  }
  if (cell.trim() || !row.endsWith('|')) cells.push(cell.trim());
  return cells;
}
