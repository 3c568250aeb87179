// Markdown as DOM nodes. Text of a model only ever becomes text nodes and checked link targets.

import { button, copyText, element } from './dom.js';
import { parseBlocks, parseInline } from './markdown.js';

/** Shows a text that grows: blocks that did not change keep their nodes, and with them selection and scroll position. */
export class MarkdownView {
  constructor(root) {
    this.root = root;
    this.sources = [];
  }

  update(text) {
    const blocks = parseBlocks(text);
    let same = 0;
    while (same < blocks.length && same < this.sources.length && blocks[same].source === this.sources[same]) same += 1;
    while (this.root.childNodes.length > same) this.root.lastChild.remove();
    for (const block of blocks.slice(same)) this.root.append(renderBlock(block));
    this.sources = blocks.map((block) => block.source);
  }
}

function renderBlock(block) {
  switch (block.type) {
    case 'heading':
      // The page has headings of its own: those of an answer begin below them.
      return element(`h${Math.min(6, block.level + 2)}`, { class: `h${block.level}` }, ...renderInline(block.text));
    case 'code':
      return renderCode(block);
    case 'quote':
      return element('blockquote', {}, ...block.blocks.map(renderBlock));
    case 'rule':
      return element('hr');
    case 'list':
      return renderList(block);
    case 'table':
      return renderTable(block);
    default:
      return element('p', {}, ...renderInline(block.text));
  }
}

function renderCode({ language, text }) {
  const copy = button('Copy', { class: 'quiet', onclick: () => copyText(text, copy) });
  return element(
    'figure',
    { class: 'code' },
    element('figcaption', {}, element('span', {}, language || 'text'), copy),
    element('pre', { tabindex: '0', 'aria-label': `Code${language ? `, ${language}` : ''}` }, element('code', {}, text)),
  );
}

function renderList({ ordered, start, tight, items }) {
  const list = element(ordered ? 'ol' : 'ul', {});
  if (ordered && start !== 1) list.setAttribute('start', String(start));
  for (const { blocks, checked } of items) {
    const item = element('li', {});
    if (checked !== null) {
      item.classList.add('task');
      const box = element('input', { type: 'checkbox', disabled: '', 'aria-label': checked ? 'done' : 'open' });
      box.checked = checked;
      item.append(box);
    }
    for (const block of blocks) {
      if (tight && block.type === 'paragraph') item.append(...renderInline(block.text));
      else item.append(renderBlock(block));
    }
    list.append(item);
  }
  return list;
}

function renderTable({ align, head, rows }) {
  const row = (cells, tag) =>
    element('tr', {}, ...cells.map((cell, column) => {
      const node = element(tag, {}, ...renderInline(cell));
      if (align[column]) node.classList.add(align[column]);
      return node;
    }));
  const body = element('tbody', {}, ...rows.map((cells) => row(cells, 'td')));
  // A region of its own, so that a wide table scrolls and the page does not.
  return element(
    'div',
    { class: 'table', tabindex: '0', role: 'region', 'aria-label': 'Table' },
    element('table', {}, element('thead', {}, row(head, 'th')), body),
  );
}

function renderInline(text) {
  return parseInline(text).map(renderNode);
}

function renderNode(node) {
  switch (node.type) {
    case 'text':
      return document.createTextNode(node.text);
    case 'break':
      return element('br');
    case 'code':
      return element('code', {}, node.text);
    case 'math':
      return element('code', { class: 'math' }, node.text);
    case 'link':
      return element(
        'a',
        { href: node.href, title: node.href, target: '_blank', rel: 'noopener noreferrer nofollow' },
        ...node.children.map(renderNode),
      );
    default:
      return element(node.type, {}, ...node.children.map(renderNode));
  }
}
