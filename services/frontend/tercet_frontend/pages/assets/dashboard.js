// The dashboard: snapshots come once a second, are kept for some minutes, and are drawn when there is something new.

import { Chart } from './chart.js';
import { CoreTable } from './cores.js';
import { announce, button, element } from './dom.js';
import { Feed } from './feed.js';
import { clock, count, NOTHING, rate, seconds, share } from './figures.js';
import { History } from './history.js';
import { KeyDialog, pageStorage, themeSwitch } from './page.js';

const HIDDEN_MS = 60_000; // a page that nobody sees keeps its connection for so long
const TABLE_S = 15; // between the rows of the table of the last minutes

const $ = (id) => document.getElementById(id);

const percentile = (of, which) => (sample) => (sample[of].count ? sample[of][which] : null);

/** Returns a function of the values that cores report; null where none does. */
const overCores = (field, reduce) => ({ cores }) => {
  const values = cores.filter(({ state }) => state !== 'connecting' && state !== 'refused').map((core) => core[field]);
  return values.length ? reduce(values) : null;
};
const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
const largest = (values) => Math.max(...values);

const milliseconds = (number) => seconds(number / 1_000);

const CHARTS = [
  {
    title: 'Requests', note: 'in progress', format: count, least: 4,
    series: [{ label: 'running', pick: ({ running }) => running }, { label: 'waiting', pick: ({ waiting }) => waiting }],
  },
  {
    title: 'Ended', note: 'requests per second', format: rate, least: 1,
    series: [{ label: 'ended', pick: (now) => now.requests_per_s }, { label: 'of these failed', pick: (now) => now.failed_per_s }],
  },
  {
    title: 'Tokens out', note: 'per second, all cores', format: rate, least: 10,
    series: [{ label: 'generated', pick: (now) => now.output_tokens_per_s }],
  },
  {
    title: 'Tokens in', note: 'per second, all cores', format: rate, least: 10,
    series: [{ label: 'of prompts', pick: (now) => now.input_tokens_per_s }],
  },
  {
    title: 'Time to first token', note: 'last minute', format: seconds, least: 0.01,
    series: ['p50', 'p90', 'p99'].map((label) => ({ label, pick: percentile('time_to_first_token', label) })),
  },
  {
    title: 'Time between tokens', note: 'last minute', format: seconds, least: 0.01,
    series: ['p50', 'p90', 'p99'].map((label) => ({ label, pick: percentile('token_gap', label) })),
  },
  {
    title: 'KV cache', note: 'held by requests', format: share, least: 1,
    series: [{ label: 'mean', pick: overCores('kv_used', mean) }, { label: 'fullest core', pick: overCores('kv_used', largest) }],
  },
  {
    title: 'Step', note: 'duration of the latest', format: milliseconds, least: 10,
    series: [{ label: 'mean', pick: overCores('step_ms', mean) }, { label: 'slowest core', pick: overCores('step_ms', largest) }],
  },
];

class Dashboard {
  constructor() {
    this.history = new History();
    this.pointed = null; // seconds before the last snapshot; null: the last one counts
    this.charts = CHARTS.map((chart) => new Chart({ ...chart, pointed: (ago) => this.point(ago) }));
    this.cores = new CoreTable($('cores'), $('no-cores'));
    this.feed = new Feed({ snapshot: (sample) => this.add(sample), stopped: (why) => this.stopped(why) });
    this.keyDialog = new KeyDialog(() => this.feed.restart());
    this.tableTime = 0;
  }

  start() {
    themeSwitch(pageStorage());
    $('charts').append(...this.charts.map(({ node }) => node));
    $('minutes-head').append(
      element('th', { scope: 'col' }, 'Time'),
      ...CHARTS.flatMap(({ title, series }) => series.map(({ label }) => element('th', { scope: 'col' }, `${title}: ${label}`))),
    );
    $('minutes').addEventListener('toggle', () => this.table());
    $('set-key').addEventListener('click', () => this.keyDialog.open());
    document.addEventListener('visibilitychange', () => this.seen(!document.hidden));
    this.seen(!document.hidden);
  }

  /** Streams go to those who look. */
  seen(visible) {
    clearTimeout(this.hiding);
    if (visible) this.feed.start();
    else this.hiding = setTimeout(() => this.feed.stop(), HIDDEN_MS);
  }

  add(sample) {
    const { last } = this.history;
    if (last && last.frontend !== sample.frontend) {
      this.cores.clear();
      announce(`Another front end answers now: ${sample.frontend}.`);
    }
    this.history.add(sample);
    this.state('live', 'live');
    this.notice(sample.not_ready);
    $('frontend').textContent = sample.frontend;
    this.refresh();
  }

  stopped({ text, key }) {
    this.state('stopped', 'not live');
    this.notice(text, key ? { label: 'Enter a key', run: () => this.keyDialog.open() } : { label: 'Now', run: () => this.feed.restart() });
  }

  state(name, text) {
    if (document.body.dataset.state === name) return;
    document.body.dataset.state = name;
    $('state').textContent = text;
  }

  notice(text, action = null) {
    const shown = text ?? '';
    if (this.noticed === shown) return; // what says it aloud speaks of news only
    this.noticed = shown;
    $('notice').hidden = !text;
    $('notice').replaceChildren(element('span', {}, shown));
    if (action) $('notice').append(button(action.label, { class: 'quiet', onclick: action.run }));
  }

  point(ago) {
    this.pointed = ago;
    this.refresh();
  }

  /** Draws with the next frame, once, whatever came since the last one. */
  refresh() {
    this.frame ??= requestAnimationFrame(() => {
      this.frame = null;
      const { last } = this.history;
      if (last) this.draw(last);
    });
  }

  draw(last) {
    const shown = this.pointed === null ? last : this.history.nearest(last.time - this.pointed);
    $('time').textContent = clock(shown.time);
    for (const chart of this.charts) chart.draw(this.history, shown);
    this.cores.draw(this.history, last);
    if (last.time - this.tableTime >= TABLE_S || last.time < this.tableTime) this.table();
  }

  /** What the charts show, in words and numbers; made while it is open. */
  table() {
    if (!$('minutes').open || !this.history.last) return;
    this.tableTime = this.history.last.time;
    $('minutes-body').replaceChildren(...this.history.every(TABLE_S).map((sample) => element(
      'tr', {}, element('th', { scope: 'row' }, clock(sample.time)),
      ...CHARTS.flatMap(({ series, format }) => series.map(({ pick }) => {
        const value = pick(sample);
        return element('td', {}, value === null ? NOTHING : format(value));
      })),
    )));
  }
}

new Dashboard().start();
