// The server's HTTP API.

import { createParser } from "../vendor/eventsource-parser.js";
import { upload } from "./upload.js";

/** An answer of the server that is an error. */
export class ApiError extends Error {
  /**
   * @param {number} status HTTP status; 0 where the error came inside a stream
   * @param {{message?: string, type?: string, param?: string | null, code?: string | number | null}} body
   * @param {number | null} retryAfter_s when to try again, where the server said so
   */
  constructor(status, body, retryAfter_s = null) {
    super(body.message || `The server answered with status ${status}.`);
    this.name = "ApiError";
    this.status = status;
    this.code = String(body.code ?? "");
    this.retryAfter_s = retryAfter_s;
  }
}

/** No answer, or one that broke off. */
export class ConnectionError extends Error {
  /** @param {string} message */
  constructor(message) {
    super(message);
    this.name = "ConnectionError";
  }
}

export class Api {
  /** @param {import("./keyring.js").Keyring} keyring */
  constructor(keyring) {
    this.keyring = keyring;
  }

  /**
   * @param {string} path below the page's own address
   * @param {RequestInit} [init]
   * @returns {Promise<any>} the JSON of the answer. Raises ApiError, ConnectionError
   */
  async json(path, init) {
    const answer = await this.#fetch(path, init);
    return unbroken(() => answer.json(), init?.signal);
  }

  /**
   * @param {string} path
   * @param {unknown} body sent as JSON
   * @param {AbortSignal} [signal]
   */
  post(path, body, signal) {
    return this.json(path, jsonRequest(body, signal));
  }

  /**
   * Post, and read the answer as server-sent events: EventSource can neither post nor send a key. A last event that is
   * not whole is dropped. Raises ApiError, ConnectionError.
   * @param {string} path
   * @param {unknown} body FormData, or sent as JSON
   * @param {AbortSignal} [signal]
   * @param {(share: number) => void} [onSent] how much of a form has been sent, of 1
   * @returns {AsyncGenerator<{event?: string, data: string}>}
   */
  async *events(path, body, signal, onSent) {
    const init = body instanceof FormData ? { method: "POST", body, signal } : jsonRequest(body, signal);
    const answer = await this.#fetch(path, { ...init, headers: { ...init.headers, Accept: "text/event-stream" } }, onSent);
    if (!answer.body) return;
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    /** @type {{event?: string, data: string}[]} */
    const whole = [];
    const parser = createParser({ onEvent: (event) => whole.push(event) });
    try {
      for (;;) {
        const { done, value } = await unbroken(() => reader.read(), signal);
        if (done) return;
        parser.feed(value);
        yield* whole.splice(0);
      }
    } finally {
      reader.cancel().catch(() => {}); // whoever stopped reading wants no more of it; a broken body has nothing to cancel
    }
  }

  /**
   * @param {string} path
   * @param {RequestInit} [init]
   * @param {(share: number) => void} [onSent]
   * @returns {Promise<Response>}
   */
  async #fetch(path, init = {}, onSent) {
    const url = new URL(path, document.baseURI);
    for (;;) {
      const { key } = this.keyring;
      const headers = new Headers(init.headers);
      if (key) headers.set("Authorization", `Bearer ${key}`);
      const { body, signal } = init;
      const isForm = onSent && body instanceof FormData;
      const answer = await unbroken(() => (isForm ? upload(url, { body, headers, signal }, onSent) : fetch(url, { ...init, headers })), signal);
      if (answer.ok) return answer;
      if (answer.status !== 401 || !(await this.keyring.renew(key))) throw await apiError(answer);
    }
  }
}

/** @param {unknown} body @param {AbortSignal} [signal] @returns {RequestInit} */
function jsonRequest(body, signal) {
  return { method: "POST", body: JSON.stringify(body), signal, headers: { "Content-Type": "application/json" } };
}

/** @param {Response} answer */
async function apiError(answer) {
  const body = await answer.json().catch(() => ({}));
  const retryAfter = Number(answer.headers.get("Retry-After"));
  return new ApiError(answer.status, body?.error ?? {}, retryAfter > 0 ? retryAfter : null);
}

/**
 * Browsers report a connection that fails or breaks as a TypeError; an abort stays what it is.
 * @template T
 * @param {() => Promise<T>} run
 * @param {AbortSignal | null} [signal]
 * @returns {Promise<T>}
 */
async function unbroken(run, signal) {
  try {
    return await run();
  } catch (error) {
    if (signal?.aborted || !(error instanceof TypeError)) throw error;
    throw new ConnectionError("The server does not answer.");
  }
}
