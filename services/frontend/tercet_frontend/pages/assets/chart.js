// Lines over the last minutes, as SVG: one axis, one unit, a few series, which differ also without colours.

import { element } from './dom.js';
import { NOTHING, roundUp } from './figures.js';
import { WINDOW_S } from './history.js';

const SVG = 'http://www.w3.org/2000/svg';
const TOP = 10;
const BOTTOM = 18;
const LEFT = 46;
const RIGHT = 8;
const MINUTE = 60;

function drawn(tag, attributes = {}, ...children) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

/** Returns the path of lines whose points `place` gives coordinates. A line of one point is a dot. */
function pathOf(lines, place) {
  return lines.map((line) => {
    const points = line.map((point) => place(point).map((number) => number.toFixed(1)).join(' '));
    return `M${points.join('L')}${points.length === 1 ? 'h0.01' : ''}`;
  }).join('');
}

/** A card: a title, what the series are at one moment, and their lines. */
export class Chart {
  /**
   * `series` are [{label, pick}], where `pick` returns the value of a snapshot or null; `format` makes values texts;
   * the axis ends at `least` or above. `pointed` is called with the seconds before the last snapshot that somebody
   * points at, or null.
   */
  constructor({ title, note, series, format, least, pointed }) {
    this.series = series;
    this.format = format;
    this.least = least;
    this.values = series.map(() => element('dd', {}, NOTHING));
    this.paths = series.map((_, index) => drawn('path', { class: `line s${index}` }));
    this.dots = series.map((_, index) => drawn('circle', { class: `dot s${index}`, r: 3 }));
    this.grid = drawn('g', { class: 'grid' });
    this.cross = drawn('path', { class: 'cross' });
    const names = series.map(({ label }) => label).join(', ');
    this.plot = drawn(
      'svg', { class: 'plot', role: 'img', 'aria-label': `${title} over the last five minutes: ${names}` },
      this.grid, this.cross, ...this.paths, ...this.dots,
    );
    this.node = element(
      'section', { class: 'card' },
      element('h2', {}, title, element('small', {}, note)),
      element('dl', {}, ...series.map(({ label }, index) => element('div', {}, swatch(index, label), this.values[index]))),
      this.plot,
    );
    this.width = 0;
    this.height = 0;
    new ResizeObserver(([{ contentRect }]) => {
      this.width = contentRect.width;
      this.height = contentRect.height;
      if (this.drawing) this.draw(...this.drawing);
    }).observe(this.plot);
    this.plot.addEventListener('pointermove', ({ offsetX }) => {
      pointed(Math.min(Math.max((this.width - RIGHT - offsetX) / this.across * WINDOW_S, 0), WINDOW_S));
    });
    this.plot.addEventListener('pointerleave', () => pointed(null));
  }

  get across() {
    return Math.max(this.width - LEFT - RIGHT, 1);
  }

  /** Draws a history; the values are those of `sample`, which is marked unless it is the last one. */
  draw(history, sample) {
    this.drawing = [history, sample];
    const lines = this.series.map(({ pick }) => history.lines(pick));
    const most = Math.max(this.least, ...lines.flat(2).map(([, value]) => value));
    const top = roundUp(most);
    const floor = this.height - BOTTOM;
    const x = (ago) => LEFT + this.across * (1 - ago / WINDOW_S);
    const y = (value) => floor - (floor - TOP) * (value / top);
    if (this.width) {
      this.axes(x, y, top);
      const ago = history.last.time - sample.time;
      const marked = sample !== history.last;
      this.cross.setAttribute('d', marked ? `M${x(ago).toFixed(1)} ${TOP}V${floor}` : '');
      this.paths.forEach((path, index) => path.setAttribute('d', pathOf(lines[index], ([past, value]) => [x(past), y(value)])));
      this.dots.forEach((dot, index) => {
        const value = this.series[index].pick(sample);
        dot.setAttribute('visibility', value === null ? 'hidden' : 'visible');
        dot.setAttribute('cx', x(ago).toFixed(1));
        dot.setAttribute('cy', y(value ?? 0).toFixed(1));
      });
    }
    this.values.forEach((node, index) => {
      const value = this.series[index].pick(sample);
      node.textContent = value === null ? NOTHING : this.format(value);
    });
  }

  axes(x, y, top) {
    const key = `${this.width} ${this.height} ${top}`;
    if (this.drawnFor === key) return;
    this.drawnFor = key;
    this.plot.setAttribute('viewBox', `0 0 ${this.width} ${this.height}`);
    const rows = [0, top / 2, top].flatMap((value) => [
      drawn('path', { d: `M${LEFT} ${y(value).toFixed(1)}H${this.width - RIGHT}` }),
      drawn('text', { x: LEFT - 8, y: (y(value) + 3.5).toFixed(1), 'text-anchor': 'end' }, value ? this.format(value) : '0'),
    ]);
    const columns = [5, 4, 3, 2, 1, 0].map((minute) => drawn(
      'text', { x: x(minute * MINUTE).toFixed(1), y: this.height - 3, 'text-anchor': minute ? 'middle' : 'end' },
      minute === 5 ? '−5 min' : minute ? `−${minute}` : 'now',
    ));
    this.grid.replaceChildren(...rows, ...columns);
  }
}

function swatch(index, label) {
  const line = drawn('svg', { class: 'swatch', viewBox: '0 0 18 6', 'aria-hidden': 'true' }, drawn('path', { class: `line s${index}`, d: 'M1 3H17' }));
  return element('dt', {}, line, label);
}

const SPARK_WIDTH = 96;
const SPARK_HEIGHT = 24;

/** A line without axes, as large as a word; what it says is said in numbers beside it. */
export class Spark {
  constructor() {
    this.path = drawn('path', { class: 'line s0' });
    this.node = drawn('svg', { class: 'spark', viewBox: `0 0 ${SPARK_WIDTH} ${SPARK_HEIGHT}`, 'aria-hidden': 'true' }, this.path);
  }

  draw(history, pick) {
    const lines = history.lines(pick);
    const top = Math.max(1, ...lines.flat().map(([, value]) => value));
    this.path.setAttribute('d', pathOf(lines, ([ago, value]) => [
      1 + (SPARK_WIDTH - 2) * (1 - ago / WINDOW_S), SPARK_HEIGHT - 2 - (SPARK_HEIGHT - 4) * (value / top),
    ]));
  }
}
