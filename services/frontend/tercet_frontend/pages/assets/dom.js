// Small helpers around the DOM.

/** Returns a new element. Attributes whose name begins with "on" are listeners; strings among the children are text. */
export function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith('on')) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

/** Returns a button with a text. */
export function button(label, attributes = {}) {
  return element('button', { type: 'button', ...attributes }, label);
}

/** Returns a button with an icon of the page's sprite, and its name for those who do not see it. */
export function iconButton(icon, label, attributes = {}) {
  return element('button', { type: 'button', class: 'icon', 'aria-label': label, title: label, ...attributes }, iconOf(icon));
}

const SVG = 'http://www.w3.org/2000/svg';

export function iconOf(name) {
  const svg = document.createElementNS(SVG, 'svg');
  svg.setAttribute('aria-hidden', 'true');
  const use = document.createElementNS(SVG, 'use');
  use.setAttribute('href', `#i-${name}`);
  svg.append(use);
  return svg;
}

/** Copies a text, and says so on the button for a moment. */
export async function copyText(text, from) {
  const done = await writeClipboard(text);
  announce(done ? 'Copied.' : 'The browser did not allow copying.');
  from.classList.add(done ? 'done' : 'failed');
  setTimeout(() => from.classList.remove('done', 'failed'), 1_400);
}

async function writeClipboard(text) {
  // Browsers keep the clipboard from pages without TLS on other machines; the older way still works there.
  if (window.isSecureContext && navigator.clipboard) {
    try {
      await navigator.clipboard.writeText(text);
      return true;
    } catch {
      // Not allowed: the older way asks nobody.
    }
  }
  const active = document.activeElement;
  const area = element('textarea', { class: 'offscreen', readonly: '' });
  area.value = text;
  document.body.append(area);
  area.select();
  const done = document.execCommand('copy');
  area.remove();
  active?.focus?.();
  return done;
}

/** Says something to screen readers. */
export function announce(text) {
  document.getElementById('status').textContent = text;
}

let hiding;

/** Shows a notice at the bottom for a while, with one thing that can be done about it. */
export function toast(text, action = null) {
  const box = document.getElementById('toast');
  announce(text);
  const close = () => box.classList.remove('shown');
  box.replaceChildren(element('span', {}, text));
  if (action) {
    box.append(button(action.label, { class: 'quiet', onclick: () => (close(), action.run()) }));
  }
  box.classList.add('shown');
  clearTimeout(hiding);
  hiding = setTimeout(close, action ? 8_000 : 4_000);
}

/** Gives a text area the height of its text; CSS bounds it. */
export function fitHeight(area) {
  area.style.height = 'auto';
  area.style.height = `${area.scrollHeight + 2}px`;
}

/** Offers a text as a file. */
export function download(name, text) {
  const url = URL.createObjectURL(new Blob([text], { type: 'application/json' }));
  element('a', { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}
