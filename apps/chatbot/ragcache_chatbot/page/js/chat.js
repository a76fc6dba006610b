// Asking: one request, and what its stream says.

import { ApiError, ConnectionError } from "./api.js";

/**
 * A passage that an answer was read from. `kv`: where its keys and values came from. `place`: in its
 * document; conversations that were kept by an older page have none.
 * @typedef {{chunk_id: string, document_id: string, title: string, source: string, place?: string, text: string,
 *   tokens: number, score: number | null, handle: string | null, kv: string}} Source
 */

/**
 * Seconds by phase.
 * @typedef {{retrieve_s: number, load_s: number, encode_s: number, place_s: number, prefill_s: number, ttft_s: number,
 *   total_s: number}} Timings
 */

/**
 * What is known when the answer is complete. `reason`: why this method read it. `estimate_s`: what a full prefill of the
 * prompt would take, where the server can say.
 * @typedef {{timings: Timings, method: string, reason: string, dropped: number,
 *   estimate_s: number | null, finish_reason: string}} Ending
 */

/** @typedef {{prompt_tokens: number, completion_tokens: number, cached_tokens: number}} Usage */

/** @typedef {{sources?: Source[], text?: string, thought?: string, ending?: Ending, usage?: Usage}} ChatEvent */

/** @typedef {{role: string, content: string}} Message */

/**
 * @typedef {{model: string, messages: Message[], method: string, k: number, trim: boolean, sampling: object,
 *   passages?: object}} Ask
 * method: "" for the store's own. trim: leave passages out that do not fit the model's context. sampling: temperature and
 * max_tokens, where they are not the server's. passages: instead of a search
 */

/**
 * Ask, and give what comes as it comes. Raises ApiError, ConnectionError.
 * @param {import("./api.js").Api} api
 * @param {Ask} ask
 * @param {AbortSignal} signal
 * @returns {AsyncGenerator<ChatEvent>}
 */
export async function* askStreaming(api, ask, signal) {
  const { model, messages, sampling } = ask;
  const passages = ask.passages ?? { k: ask.k };
  const ragcache = { ...passages, ...methodField(ask.method), ...(ask.trim ? { on_overflow: "trim" } : {}) };
  const request = { model, messages, ...sampling, stream: true, stream_options: { include_usage: true }, ragcache };
  let complete = false;
  for await (const { data } of api.events("v1/chat/completions", request, signal)) {
    if (data === "[DONE]") complete = true;
    else yield readChunk(JSON.parse(data));
  }
  if (!complete) throw new ConnectionError("The connection broke before the answer was complete.");
}

/** @param {string} method "" for the store's own */
export const methodField = (method) => (method ? { method } : {});

/** @param {any} chunk @returns {ChatEvent} */
function readChunk(chunk) {
  if (chunk.error) throw new ApiError(Number(chunk.error.status ?? 0), chunk.error);
  const choice = chunk.choices?.[0];
  const extra = chunk.ragcache ?? {};
  return {
    sources: extra.sources,
    text: choice?.delta?.content ?? "",
    thought: choice?.delta?.reasoning_content ?? "",
    ending: choice?.finish_reason ? readEnding(extra, choice.finish_reason) : undefined,
    usage: chunk.usage ? readUsage(chunk.usage) : undefined,
  };
}

/** @param {any} extra @param {string} finish_reason @returns {Ending} */
function readEnding(extra, finish_reason) {
  const { timings, method, method_reason: reason, dropped = 0 } = extra;
  const estimate_s = extra.full_prefill_estimate_s || null;
  return { timings, method, reason, dropped, estimate_s, finish_reason };
}

/** @param {any} usage @returns {Usage} */
function readUsage(usage) {
  const { prompt_tokens, completion_tokens, prompt_tokens_details } = usage;
  return { prompt_tokens, completion_tokens, cached_tokens: prompt_tokens_details?.cached_tokens ?? 0 };
}
