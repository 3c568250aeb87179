// One answer that is being made. It goes on when another conversation is looked at, and ends when it is stopped.

import { ApiError, streamChat } from './api.js';

// A page that is left loses its connections before it ends: that is no failure of the server.
let leaving = false;
addEventListener('beforeunload', () => {
  leaving = true;
  // A download asks too, and the page stays.
  setTimeout(() => (leaving = false), 2_000);
});

export class Run {
  /**
   * Appends an empty answer to the conversation; `start` fills it.
   * `changed` is called whenever the answer has grown, at most as often as the server sends.
   */
  constructor(conversation, model, changed) {
    this.conversation = conversation;
    this.model = model;
    this.changed = changed;
    this.controller = new AbortController();
    this.request = requestOf(conversation, model);
    this.message = { role: 'assistant', content: '' };
    conversation.messages.push(this.message);
  }

  /** Ends the request; what came so far is the answer. */
  stop() {
    this.controller.abort();
  }

  /** Returns when the answer has ended, in whichever way. */
  async start() {
    const { message } = this;
    try {
      if (!this.model) {
        throw new ApiError('The server has not said yet which models it serves.', {
          title: 'No model', advice: 'Wait until the name of a model is shown above, then try again.',
        });
      }
      await this.receive(message);
    } catch (error) {
      if (error.name === 'AbortError' || leaving) message.finish = 'stopped';
      else {
        message.finish = 'error';
        const { title = 'The answer failed', advice = '', status = 0 } = error;
        message.error = { title, message: error.message, advice, status };
      }
    }
    message.finish ??= 'stop';
  }

  async receive(message) {
    const begin = performance.now();
    let first = null;
    let pieces = 0;
    const measure = (tokens, exact) => {
      const now = performance.now();
      first ??= now;
      message.stats = { tokens, exact, seconds: (now - first) / 1000, first: (first - begin) / 1000 };
    };
    for await (const { content, reasoning, finish, usage } of streamChat(this.request, this.controller.signal)) {
      if (content !== undefined) {
        message.content += content;
        measure((pieces += 1), false);
      } else if (reasoning !== undefined) {
        message.reasoning = (message.reasoning ?? '') + reasoning;
        measure((pieces += 1), false);
      } else if (finish !== undefined) {
        message.finish = finish;
        measure(pieces, false);
      } else if (usage !== undefined && message.stats) {
        message.stats.tokens = usage.completion_tokens;
        message.stats.exact = true;
      }
      this.changed(this);
    }
  }
}

/** Returns the body of the request for the next answer. Answers that failed before their first word are left out. */
function requestOf({ system, params, messages }, model) {
  const conversation = messages.filter(({ content }) => content).map(({ role, content }) => ({ role, content }));
  if (system.trim()) conversation.unshift({ role: 'system', content: system });
  return { model, messages: conversation, ...params };
}
