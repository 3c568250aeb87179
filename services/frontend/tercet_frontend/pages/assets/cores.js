// The table of cores: one row each, which stays where it is while its numbers change.

import { Spark } from './chart.js';
import { announce, element } from './dom.js';
import { count, NOTHING, rate, seconds, share } from './figures.js';

const COLUMNS = [
  ({ running }) => count(running),
  ({ waiting }) => count(waiting),
  ({ own }) => count(own),
  null, // the KV cache, which has a bar
  ({ cached }) => share(cached),
  ({ step_ms: step }) => (step ? seconds(step / 1_000) : NOTHING),
  null, // tokens out, which have a line
  ({ input_tokens_per_s: tokens }) => rate(tokens),
  ({ preemptions }) => count(preemptions),
];

export class CoreTable {
  constructor(body, empty) {
    this.body = body;
    this.empty = empty;
    this.rows = new Map(); // by address
  }

  /** Shows the cores of a snapshot; `history` is for the lines. */
  draw(history, { cores }) {
    this.empty.hidden = cores.length > 0;
    const gone = new Set(this.rows.keys());
    for (const core of cores) {
      gone.delete(core.address);
      if (!this.rows.has(core.address)) {
        this.rows.set(core.address, new Row());
        this.body.append(this.rows.get(core.address).node);
      }
      this.rows.get(core.address).draw(core, history);
    }
    for (const address of gone) {
      announce(`The core at ${address} is gone.`);
      this.rows.get(address).node.remove();
      this.rows.delete(address);
    }
  }

  clear() {
    this.rows.clear();
    this.body.replaceChildren();
  }
}

class Row {
  constructor() {
    this.name = element('span', { class: 'core' });
    this.address = element('small');
    this.model = element('td', { class: 'words' });
    this.state = element('span');
    this.bar = element('i');
    this.used = element('span');
    this.tokens = element('span');
    this.spark = new Spark();
    const drawn = [
      element('td', { class: 'used' }, element('span', { class: 'bar', 'aria-hidden': 'true' }, this.bar), this.used),
      element('td', { class: 'trend' }, this.spark.node, this.tokens),
    ];
    this.cells = COLUMNS.map((column) => (column ? element('td') : drawn.shift()));
    this.node = element(
      'tr', {},
      element('th', { scope: 'row' }, this.name, this.address),
      element('td', { class: 'words' }, this.state), this.model, ...this.cells,
    );
  }

  draw(core, history) {
    const { address, state } = core;
    this.name.textContent = core.core_id || 'not yet known';
    this.address.textContent = address;
    this.model.textContent = core.model || NOTHING;
    if (this.state.textContent !== state) {
      if (this.state.textContent) announce(`The core at ${address} is now ${state}.`);
      this.state.textContent = state;
      this.state.className = `state ${state}`;
    }
    COLUMNS.forEach((column, index) => {
      if (column) this.cells[index].textContent = column(core);
    });
    this.used.textContent = share(core.kv_used);
    this.bar.style.width = `${(core.kv_used * 100).toFixed(1)}%`;
    this.tokens.textContent = rate(core.output_tokens_per_s);
    this.spark.draw(history, (sample) => sample.cores.find((each) => each.address === address)?.output_tokens_per_s ?? null);
  }
}
