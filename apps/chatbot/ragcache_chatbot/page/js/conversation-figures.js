// What the answers of this conversation cost together: the time of one says little.

import { byId, element } from "./dom.js";
import { count, duration, median } from "./format.js";

/** @param {import("./conversation.js").Answer[]} answers */
export function showFigures(answers) {
  const answered = answers.filter(({ state, ending, usage }) => state === "done" && ending && usage);
  const found = rows(answered).flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, value)]);
  byId("conversation-figures").replaceChildren(...found);
}

/** @param {import("./conversation.js").Answer[]} answers @returns {[string, string][]} */
function rows(answers) {
  const prompts = answers.flatMap(({ usage }) => usage ?? []);
  const avoided = sum(prompts.map(({ cached_tokens }) => cached_tokens));
  const all = sum(prompts.map(({ prompt_tokens }) => prompt_tokens));
  return [
    ["Answers", count(prompts.length)],
    ...(all ? [/** @type {[string, string]} */ (["Tokens from the cache", `${count(avoided)} of ${count(all)}`])] : []),
    ...firstTokens(answers),
  ];
}

/** Times of different methods are not mixed. @param {import("./conversation.js").Answer[]} answers @returns {[string, string][]} */
function firstTokens(answers) {
  /** @type {Map<string, number[]>} */
  const times = new Map();
  for (const { method, timings } of answers.flatMap(({ ending }) => ending ?? []))
    times.set(method, [...(times.get(method) ?? []), timings.ttft_s]);
  return [...times].map(([method, found]) => {
    const what = found.length > 1 ? `, median of ${count(found.length)}` : "";
    return [`First token, ${method}`, duration(median(found)) + what];
  });
}

/** @param {number[]} values */
const sum = (values) => values.reduce((total, value) => total + value, 0);
