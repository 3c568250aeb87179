// The list of conversations.

import { button, element, iconButton } from './dom.js';

const DAY = 86_400_000;

export class Sidebar {
  /** `actions`: open(id), rename(id, title), remove(id). */
  constructor(list, actions) {
    this.list = list;
    this.actions = actions;
  }

  /** Shows the conversations; `current` is the id of the one that is open, `running` those that are being answered. */
  show(conversations, current, running) {
    if (this.list.querySelector('input')) return; // somebody is typing a name
    const nodes = [];
    let group = null;
    for (const conversation of conversations) {
      const when = ageOf(conversation.updated);
      if (when !== group) nodes.push(element('li', { class: 'when' }, (group = when)));
      nodes.push(this.entry(conversation, conversation.id === current, running.has(conversation.id)));
    }
    const focused = this.list.contains(document.activeElement) ? document.activeElement.closest('.entry')?.dataset.id : null;
    this.list.replaceChildren(...nodes);
    if (focused) this.list.querySelector(`[data-id="${focused}"] .name`)?.focus();
  }

  entry({ id, title }, current, running) {
    const name = button(title, { class: 'name', title, onclick: () => this.actions.open(id) });
    if (current) name.setAttribute('aria-current', 'page');
    const rename = () => this.rename(node, id, title);
    name.addEventListener('dblclick', rename);
    const node = element(
      'li', { class: 'entry', 'data-id': id },
      name,
      iconButton('edit', 'Rename', { onclick: rename }),
      iconButton('trash', 'Delete', { onclick: () => this.actions.remove(id) }),
    );
    node.classList.toggle('current', current);
    node.classList.toggle('running', running);
    return node;
  }

  rename(node, id, title) {
    const input = element('input', { 'aria-label': 'Name of the conversation', maxlength: '200' });
    input.value = title;
    let over = false;
    const end = (value) => {
      if (over) return;
      over = true;
      input.remove();
      this.actions.rename(id, value.trim() || title);
    };
    input.addEventListener('keydown', (event) => {
      if (event.key === 'Enter' && !event.isComposing) end(input.value);
      if (event.key === 'Escape') {
        event.stopPropagation();
        end(title);
      }
    });
    input.addEventListener('blur', () => end(input.value));
    node.replaceChildren(input);
    input.select();
  }
}

function ageOf(time) {
  const midnight = new Date().setHours(0, 0, 0, 0);
  if (time >= midnight) return 'Today';
  if (time >= midnight - DAY) return 'Yesterday';
  return time >= midnight - 6 * DAY ? 'This week' : 'Earlier';
}
