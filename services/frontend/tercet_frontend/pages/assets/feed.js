// The stream of snapshots, begun again whenever it ends.

import { apiKey, ask, headers } from './api.js';
import { eventsOf } from './sse.js';

const RETRY_MS = 1_000;
const RETRY_MOST_MS = 10_000;
const SILENCE_MS = 15_000; // snapshots come every second: after so long the connection is dead, whatever it says

export class Feed {
  /** `snapshot` gets each snapshot; `stopped` gets {text, key}: why none come, and whether a key would help. */
  constructor({ snapshot, stopped }) {
    this.snapshot = snapshot;
    this.stopped = stopped;
    this.running = null; // what aborts it
  }

  /** Begins, unless it has begun. */
  start() {
    if (this.running) return;
    this.running = new AbortController();
    this.run(this.running.signal);
  }

  /** Lets go of the connection; nothing comes until `start`. */
  stop() {
    clearTimeout(this.silence);
    this.running?.abort();
    this.running = null;
  }

  restart() {
    this.stop();
    this.start();
  }

  async run(signal) {
    for (let delay = RETRY_MS; !signal.aborted; delay = Math.min(delay * 1.5, RETRY_MOST_MS)) {
      try {
        const response = await ask('dashboard/events', { headers: headers(), signal });
        for await (const data of eventsOf(response)) {
          if (signal.aborted) return;
          delay = RETRY_MS;
          this.listen();
          this.snapshot(JSON.parse(data));
        }
        this.report(signal, 'The server has ended the stream. Trying again…');
      } catch (error) {
        if (error.status === 401) {
          this.report(signal, apiKey.get() ? 'The server does not accept this API key.' : 'This server asks for an API key.', true);
          return;
        }
        if (error.status === 404) {
          this.report(signal, error.message, true);
          return;
        }
        this.report(signal, `${error.status === undefined ? 'The connection was lost.' : error.message} Trying again…`);
      }
      clearTimeout(this.silence);
      await new Promise((resolve) => { setTimeout(resolve, delay); });
    }
  }

  report(signal, text, key = false) {
    if (!signal.aborted) this.stopped({ text, key });
  }

  listen() {
    clearTimeout(this.silence);
    this.silence = setTimeout(() => {
      this.stopped({ text: 'The server is silent. Trying again…', key: false });
      this.restart();
    }, SILENCE_MS);
  }
}
