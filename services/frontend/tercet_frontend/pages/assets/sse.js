// Server-sent events from a fetched body: what EventSource does, for answers to a POST.

/** Takes text as it comes and returns the data of events that are complete. */
export class EventParser {
  constructor() {
    this.rest = '';
    this.data = [];
  }

  push(text) {
    const lines = (this.rest + text).split('\n');
    this.rest = lines.pop();
    const events = [];
    for (const raw of lines) {
      const line = raw.endsWith('\r') ? raw.slice(0, -1) : raw;
      if (line === '') {
        if (this.data.length) events.push(this.data.join('\n'));
        this.data = [];
      } else if (line.startsWith('data:')) {
        this.data.push(line.slice(line[5] === ' ' ? 6 : 5));
      }
    }
    return events;
  }
}

/** Yields the data of each event of a response. */
export async function* eventsOf(response) {
  const reader = response.body.getReader();
  const decoder = new TextDecoder();
  const parser = new EventParser();
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      yield* parser.push(decoder.decode(value, { stream: true }));
    }
  } finally {
    // Whoever stops listening ends the request, and with it the work behind it.
    reader.cancel().catch(() => {});
  }
}
