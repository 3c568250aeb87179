// The snapshots of the last minutes. They live as long as the page: the server keeps none.

export const WINDOW_S = 300;

const GAP_S = 5; // more than this between two snapshots, and the line between them would be made up

export class History {
  constructor() {
    this.samples = [];
  }

  get last() {
    return this.samples.at(-1) ?? null;
  }

  /** Adds a snapshot, and forgets those that are too old; all of them, if they are of another front end or a later time. */
  add(sample) {
    const { last } = this;
    if (last && (last.frontend !== sample.frontend || last.time > sample.time)) this.samples = [];
    this.samples.push(sample);
    const old = this.samples.findIndex(({ time }) => time >= sample.time - WINDOW_S);
    this.samples.splice(0, old);
  }

  /** Returns the snapshot nearest to a time, or null where there is none. */
  nearest(time) {
    const distance = (sample) => Math.abs(sample.time - time);
    return this.samples.reduce((best, sample) => (best && distance(best) <= distance(sample) ? best : sample), null);
  }

  /**
   * Returns the lines that a value makes, as lists of [seconds before the last snapshot, value].
   * `pick` returns the value of a snapshot, or null; there, and where snapshots are missing, a line ends.
   */
  lines(pick) {
    const lines = [];
    let before = null;
    for (const sample of this.samples) {
      const value = pick(sample);
      if (value !== null) {
        if (before === null || sample.time - before > GAP_S) lines.push([]);
        lines.at(-1).push([this.last.time - sample.time, value]);
      }
      before = value === null ? null : sample.time;
    }
    return lines;
  }

  /** Returns snapshots that are so many seconds apart, the latest first. */
  every(seconds) {
    const chosen = [];
    for (const sample of this.samples.toReversed()) {
      if (!chosen.length || chosen.at(-1).time - sample.time >= seconds - 0.5) chosen.push(sample);
    }
    return chosen;
  }
}
