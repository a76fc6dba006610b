// What went wrong, and what to do about it.

import { ApiError, ConnectionError } from "./api.js";

/**
 * An error as it is shown and kept with a turn.
 * @typedef {{message: string, advice: string, overflow: boolean, mayPass: boolean}} Trouble
 * overflow: the prompt did not fit the model's context; asking for less would help. mayPass: the same may work later
 */

/** Below 500: no status (inside a stream), no key, too slow, busy. */
const PASSING = [0, 401, 408, 409, 429];

/** @param {unknown} error @returns {Trouble} */
export function explain(error) {
  const message = error instanceof Error ? error.message : String(error);
  const overflow = error instanceof ApiError && error.code === "context_length_exceeded";
  const mayPass = !(error instanceof ApiError) || PASSING.includes(error.status) || error.status >= 500;
  return { message, advice: advice(error, overflow), overflow, mayPass };
}

/** @param {unknown} error @param {boolean} overflow */
function advice(error, overflow) {
  if (error instanceof ConnectionError)
    return "If the server was stopped, start it again with “ragcache chat --web”; then try again.";
  if (!(error instanceof ApiError)) return "Try again; if it happens again, reload the page.";
  if (overflow) return "Read fewer passages, ask without earlier turns, or leave out passages that do not fit.";
  switch (error.status) {
    case 401:
      return "Try again and enter the server's key; whoever runs the server knows it.";
    case 403:
      return "Whoever runs the server can allow it.";
    case 404:
      return "It may be gone already. Reload the page to see what is there.";
    case 413:
      return "Send less at once: fewer or smaller files, or a shorter question.";
    case 409:
    case 429:
    case 503:
      return `The server is busy. Try again in ${error.retryAfter_s ? `${error.retryAfter_s} s` : "a moment"}.`;
    case 504:
      return "Ask for less: fewer passages, a shorter answer. Or try again.";
    case 507:
      return "Delete documents that are not needed, or give the store more room; then try again.";
    default:
      return error.status >= 500 ? "The server's log says more. Try again." : "Change what you asked for, then try again.";
  }
}
