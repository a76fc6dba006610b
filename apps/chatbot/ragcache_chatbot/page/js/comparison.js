// A full prefill beside the answer's own method: both are run several times, because one run says little.

import { methodField } from "./chat.js";

const RUNS = 5; // odd, so that one of them is the middle one
const FULL = { method: "full", method_options: { reuse: false } };

/**
 * The run in the middle by time to the first token, of so many by either method.
 * @typedef {{runs: number, own: import("./chat.js").Timings, full: import("./chat.js").Timings}} Comparison
 */

/**
 * Read an answer's prompt again, by its own method and in full by turns. Raises ApiError, ConnectionError.
 * @param {import("./api.js").Api} api
 * @param {{model: string, messages: import("./chat.js").Message[], answer: import("./conversation.js").Answer}} asked
 * @param {AbortSignal} signal
 * @param {(run: number, runs: number) => void} onRun before each run
 * @returns {Promise<Comparison>}
 */
export async function compare(api, { model, messages, answer }, signal, onRun) {
  const passages = passagesField(answer.sources ?? []);
  /** @type {import("./chat.js").Timings[]} */
  const own = [];
  /** @type {import("./chat.js").Timings[]} */
  const full = [];
  while (full.length < RUNS) {
    const [into, method] = own.length > full.length ? [full, FULL] : [own, methodField(answer.method)];
    onRun(own.length + full.length + 1, 2 * RUNS);
    const request = { model, messages, max_tokens: 1, ragcache: { ...method, ...passages } };
    const { ragcache } = await api.post("v1/chat/completions", request, signal);
    into.push(ragcache.timings);
  }
  return { runs: RUNS, own: middle(own), full: middle(full) };
}

/** An answer's passages as they are, so that nothing is searched. @param {import("./chat.js").Source[]} sources */
export function passagesField(sources) {
  const documents = sources.map(({ text, chunk_id, handle }) => ({ text, id: chunk_id, ...(handle ? { handle } : {}) }));
  return documents.length ? { documents } : { retrieve: false };
}

/** @param {import("./chat.js").Timings[]} runs */
const middle = (runs) => [...runs].sort((a, b) => a.ttft_s - b.ttft_s)[runs.length >> 1];
