// Time to the first token, by phase.

/** @typedef {{name: string, seconds: number, estimated?: boolean}} Segment */

/**
 * One way of reading the prompt.
 * @typedef {{label: string, total_s: number, segments: Segment[]}} Reading
 */

/** Phases in their order, with what happens in each. `rest` is what no phase counts. */
export const PHASES = {
  retrieve: "embed the question and search",
  load: "read stored blocks",
  encode: "compute passages that were not stored",
  place: "move blocks into place",
  prefill: "run the model over what is left",
  rest: "the template, the first token's choice, waiting",
};

/**
 * @param {string} label
 * @param {import("./chat.js").Timings} timings
 * @returns {Reading}
 */
export function measured(label, timings) {
  const { retrieve_s, load_s, encode_s, place_s, prefill_s, ttft_s } = timings;
  const rest_s = Math.max(0, ttft_s - retrieve_s - load_s - encode_s - place_s - prefill_s);
  const seconds = [retrieve_s, load_s, encode_s, place_s, prefill_s, rest_s];
  const segments = Object.keys(PHASES).map((name, i) => ({ name, seconds: seconds[i] }));
  return { label, total_s: ttft_s, segments };
}

/**
 * A full prefill that was not run: the search that was, and the estimate.
 * @param {import("./chat.js").Timings} timings of the answer
 * @param {number} estimate_s
 * @returns {Reading}
 */
export function estimated(timings, estimate_s) {
  const segments = [
    { name: "retrieve", seconds: timings.retrieve_s },
    { name: "prefill", seconds: estimate_s, estimated: true },
  ];
  return { label: "full, estimated", total_s: timings.retrieve_s + estimate_s, segments };
}

/**
 * The ways of reading that an answer can show: its own, and a full prefill beside it.
 * @param {import("./conversation.js").Answer} answer
 * @returns {Reading[]}
 */
export function readings({ ending, comparison }) {
  if (!ending) return [];
  const own = measured(ending.method, ending.timings);
  if (ending.method === "full") return [own];
  if (comparison) {
    const many = `median of ${comparison.runs}`;
    return [own, measured(`${ending.method}, ${many}`, comparison.own), measured(`full, ${many}`, comparison.full)];
  }
  return ending.estimate_s === null ? [own] : [own, estimated(ending.timings, ending.estimate_s)];
}
