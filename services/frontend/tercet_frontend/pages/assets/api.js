// The server's API: models, streamed answers, and what its errors mean for the person who reads them.

import { eventsOf } from './sse.js';

const KEY = 'tercet.key';

/** An answer that failed: `message` is the server's sentence, `advice` says what can be done. */
export class ApiError extends Error {
  constructor(message, { status = 0, title = 'The answer failed', advice = '', param = null } = {}) {
    super(message);
    Object.assign(this, { status, title, advice, param });
  }
}

/** The API key: kept for this tab, and in the browser when asked to. */
export const apiKey = {
  get() {
    try {
      return sessionStorage.getItem(KEY) ?? localStorage.getItem(KEY) ?? '';
    } catch {
      return this.memory ?? '';
    }
  },
  set(value, remember) {
    this.memory = value;
    try {
      sessionStorage.removeItem(KEY);
      localStorage.removeItem(KEY);
      if (value) (remember ? localStorage : sessionStorage).setItem(KEY, value);
    } catch {
      // Without storage the key lives as long as the page.
    }
  },
  remembered() {
    try {
      return localStorage.getItem(KEY) !== null;
    } catch {
      return false;
    }
  },
};

/** Returns the headers of a request: the key, where there is one, and more. */
export function headers(more = {}) {
  const key = apiKey.get();
  return key ? { ...more, Authorization: `Bearer ${key}` } : more;
}

// Relative to the page, which may be served below a path by a proxy.
const urlOf = (path) => new URL(path, document.baseURI);

/** Returns the response to a request, once its head is there. Raises ApiError for all others than 200. */
export async function ask(path, options) {
  let response;
  try {
    response = await fetch(urlOf(path), { ...options, cache: 'no-store', credentials: 'same-origin' });
  } catch (error) {
    if (error.name === 'AbortError') throw error;
    throw new ApiError('The server cannot be reached.', {
      title: 'No connection',
      advice: 'Check that it is still running and that this device is connected, then try again.',
    });
  }
  if (!response.ok) throw await errorOf(response);
  return response;
}

/** Returns the models that are served now: [{id, max_model_len}]. */
export async function listModels() {
  const response = await ask('v1/models', { headers: headers() });
  const { data } = await response.json();
  return data;
}

/**
 * Yields what becomes of one answer: {content}, {reasoning}, {finish} and at the end {usage}.
 * Raises ApiError; an abort of the signal raises AbortError and ends the request at the server.
 */
export async function* streamChat(body, signal) {
  const response = await ask('v1/chat/completions', {
    method: 'POST',
    headers: headers({ 'Content-Type': 'application/json' }),
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  let done = false;
  try {
    // To the end of the body, also after the last event: leaving earlier would break the connection off.
    for await (const data of eventsOf(response)) {
      if (data === '[DONE]') done = true;
      else yield* partsOf(JSON.parse(data));
    }
  } catch (error) {
    if (error instanceof ApiError || error.name === 'AbortError') throw error;
    throw broken();
  }
  if (!done) throw broken();
}

function* partsOf(chunk) {
  if (chunk.error) throw describe(chunk.error.message, chunk.error.code === 'service_unavailable' ? 503 : 500, chunk.error);
  const [choice] = chunk.choices;
  if (choice) {
    const { delta } = choice;
    const reasoning = delta.reasoning_content ?? delta.reasoning;
    if (reasoning) yield { reasoning };
    if (delta.content) yield { content: delta.content };
    if (choice.finish_reason) yield { finish: choice.finish_reason };
  }
  if (chunk.usage) yield { usage: chunk.usage };
}

function broken() {
  return new ApiError('The connection broke before the answer was complete.', {
    title: 'The answer is incomplete',
    advice: 'What came so far is kept. Try again for a whole answer.',
  });
}

async function errorOf(response) {
  let error = {};
  try {
    error = (await response.json()).error ?? {};
  } catch {
    // Not this server's own answer: a proxy in between, for example.
  }
  return describe(error.message ?? `The server answered ${response.status} ${response.statusText}.`, response.status, error);
}

function describe(message, status, { code = null, param = null } = {}) {
  const { title, advice } = meaning(status, code, param);
  return new ApiError(message, { status, title, advice, param });
}

function meaning(status, code, param) {
  if (status === 401) return { title: 'An API key is needed', advice: 'Enter the key that this server was started with.' };
  if (code === 'context_length_exceeded') {
    return {
      title: 'The conversation is too long for this model',
      advice: 'Start a new conversation, edit an earlier message, or lower the limit of tokens.',
    };
  }
  if (code === 'model_not_found') return { title: 'This model is not served', advice: 'Choose another model above.' };
  if (status === 413) return { title: 'The message is too large', advice: 'Send less text at once.' };
  if (status === 429) return { title: 'The server is busy', advice: 'Wait a moment, then try again.' };
  if (status === 503) return { title: 'The server is not ready', advice: 'It may be starting or restarting. Try again in a few seconds.' };
  if (status >= 500) return { title: 'The server had an error', advice: 'Try again; the server\u2019s log says more.' };
  return {
    title: 'The server did not accept this',
    advice: param ? `Change \u201c${param}\u201d, then try again.` : 'Change the message or the parameters, then try again.',
  };
}
