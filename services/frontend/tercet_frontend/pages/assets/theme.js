// Before anything is painted: the colours that were chosen here, if any. Otherwise the system's count.
'use strict';

(() => {
  let chosen = null;
  try {
    chosen = localStorage.getItem('tercet.theme');
  } catch {
    // No storage, no choice.
  }
  if (chosen === 'light' || chosen === 'dark') document.documentElement.dataset.theme = chosen;
})();
