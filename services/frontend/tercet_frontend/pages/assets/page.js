// What the pages share: storage, the switch of colours, the dialog for the API key.

import { apiKey } from './api.js';

/** Returns the browser's storage for this site, or null where there is none. */
export function pageStorage() {
  try {
    localStorage.setItem('tercet.probe', '1');
    localStorage.removeItem('tercet.probe');
    return localStorage;
  } catch {
    return null;
  }
}

/** Makes the switch of colours work, and remembers the choice; see theme.js for the time before. */
export function themeSwitch(storage) {
  const root = document.documentElement;
  for (const input of document.querySelectorAll('#theme input')) {
    input.checked = input.value === (root.dataset.theme ?? 'auto');
    input.addEventListener('change', () => {
      if (input.value === 'auto') delete root.dataset.theme;
      else root.dataset.theme = input.value;
      storage?.setItem('tercet.theme', input.value);
    });
  }
}

/** The dialog that asks for the API key; `used` is called when there is another one. */
export class KeyDialog {
  constructor(used) {
    const named = (id) => document.getElementById(id);
    this.dialog = named('key-dialog');
    this.key = named('key');
    this.remember = named('remember');
    named('key-cancel').addEventListener('click', () => this.dialog.close());
    named('key-form').addEventListener('submit', (event) => {
      event.preventDefault();
      apiKey.set(this.key.value.trim(), this.remember.checked);
      this.dialog.close();
      used();
    });
  }

  open() {
    this.key.value = apiKey.get();
    this.remember.checked = apiKey.remembered();
    this.dialog.showModal();
    this.key.select();
  }
}
