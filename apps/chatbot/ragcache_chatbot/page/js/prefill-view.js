// What reading the prompt cost: one line, which opens a bar for each way of reading it, cut by phase, and the same as a table.

import { element, svg } from "./dom.js";
import { Fold } from "./fold.js";
import { count, counted, duration } from "./format.js";
import { PHASES, readings } from "./phases.js";
import { originsText } from "./sources-view.js";

const GAP = 0.4; // percent of the width, between segments
const SMALL = 0.05; // of the time to the first token: phases below are named together

/** @typedef {import("./phases.js").Reading} Reading */

export class PrefillView {
  #waiting = element("p", { class: "note" });
  #picture = element("div", { class: "picture" });
  #measure = element("button", { type: "button", class: "small measure" });
  #trouble = element("p", { class: "trouble", role: "alert" });
  #table = element("table");
  #figures = element("details", { class: "figures-table" }, element("summary", {}, "Figures by phase"), this.#table);
  #fold = new Fold("prefill", this.#picture, this.#measure, this.#trouble, this.#figures);
  nodes = [this.#waiting, this.#fold.node];
  /** Running since the question was sent, while no token has come. */
  waited_s = 0;
  /** How far a comparison is, such as "3 of 10", while one runs. */
  measuring = "";
  /** Why no comparison could be made. */
  trouble = "";

  /** @param {() => void} measure compares with a full prefill, or ends the comparison that runs */
  constructor(measure) {
    this.#measure.addEventListener("click", measure);
    this.#fold.node.addEventListener("toggle", () => {
      if (this.#fold.node.open) this.#fold.node.scrollIntoView({ block: "nearest" });
    });
  }

  /** @param {import("./conversation.js").Answer} answer */
  update(answer) {
    this.#waiting.textContent = waiting(answer, this.waited_s);
    this.#waiting.hidden = !this.#waiting.textContent;
    const found = readings(answer);
    this.#fold.node.hidden = !found.length;
    if (!found.length) return;
    this.#fold.title(line(answer));
    this.#picture.replaceChildren(...picture(found, answer));
    this.#table.replaceChildren(...tableParts(found));
    this.#trouble.textContent = this.trouble;
    this.#trouble.hidden = !this.trouble;
    this.#measure.hidden = answer.state !== "done" || answer.ending?.method === "full";
    const words = answer.comparison ? "Measure again" : "Measure a full prefill";
    this.#measure.textContent = this.measuring ? `Stop measuring (${this.measuring})` : words;
  }

  close() {
    this.#fold.node.open = false;
  }
}

/** What is known before the server says more. @param {import("./conversation.js").Answer} answer @param {number} waited_s */
function waiting({ state, ending, first_token_s }, waited_s) {
  if (ending) return "";
  if (first_token_s !== null) return `First token seen after ${duration(first_token_s)}`;
  return state === "asking" ? `Reading the prompt: ${waited_s.toFixed(1)} s` : "";
}

/** @param {import("./conversation.js").Answer} answer that has ended */
function line({ ending, usage }) {
  const cached = usage && `${count(usage.cached_tokens)} of ${counted(usage.prompt_tokens, "token")} from the cache`;
  return [duration(ending?.timings.ttft_s ?? 0), cached].filter(Boolean).join(", ");
}

/** @param {Reading[]} found @param {import("./conversation.js").Answer} answer */
function picture(found, answer) {
  const longest_s = Math.max(...found.map(({ total_s }) => total_s), Number.EPSILON);
  const rows = found.map((reading) => row(reading.label, bar(reading, longest_s), duration(reading.total_s)));
  const says = element("p", { class: "statement" }, statement(answer));
  return [element("div", { class: "readings" }, ...rows), legend(found[0]), says];
}

/** @param {string} label @param {Node} beside @param {string} value */
function row(label, beside, value) {
  const name = element("span", { class: "reading-name" }, label);
  return element("div", { class: "reading" }, name, beside, element("span", { class: "reading-value" }, value));
}

/** @param {Reading} reading @param {number} longest_s */
function bar({ label, total_s, segments }, longest_s) {
  const spoken = segments.filter(isSeen).map(({ name, seconds }) => `${name} ${duration(seconds)}`);
  const drawn = svg("svg", { class: "bar-of-phases", role: "img", height: 18, width: "100%" });
  drawn.setAttribute("aria-label", `${label}: ${duration(total_s)} to the first token: ${spoken.join(", ")}`);
  let x = 0;
  for (const { name, seconds, estimated } of segments) {
    const width = (100 * seconds) / longest_s;
    if (width > 0) drawn.append(segment(name, x, width, Boolean(estimated)));
    x += width;
  }
  return drawn;
}

/** @param {string} name @param {number} x @param {number} width of the picture's, in percent @param {boolean} estimated */
function segment(name, x, width, estimated) {
  const shown = Math.max(width - GAP, Math.min(width, GAP));
  const style = `phase phase-${name}${estimated ? " estimated" : ""}`;
  return svg("rect", { class: style, x: `${x}%`, y: 1, width: `${shown}%`, height: 16, rx: 2 });
}

/** The answer's own phases, the longest first; small ones together. @param {Reading} own */
function legend({ segments, total_s }) {
  const seen = segments.filter(isSeen).sort((a, b) => b.seconds - a.seconds);
  const large = seen.filter(({ seconds }) => seconds >= SMALL * total_s);
  const small_s = seen.slice(large.length).reduce((total, { seconds }) => total + seconds, 0);
  const entries = large.map(({ name, seconds }) => legendEntry(PHASES[/** @type {keyof typeof PHASES} */ (name)], swatch(name), `${name} ${duration(seconds)}`));
  const others = small_s ? [legendEntry("Phases below a twentieth of the whole", `others ${duration(small_s)}`)] : [];
  return element("ul", { class: "legend", "aria-hidden": "true" }, ...entries, ...others);
}

/** @param {string} title @param {...(Node | string)} parts */
const legendEntry = (title, ...parts) => element("li", { title }, ...parts);

/** @param {string} name */
function swatch(name) {
  const square = svg("rect", { class: `phase phase-${name}`, width: 10, height: 10, rx: 2 });
  return svg("svg", { width: 10, height: 10 }, square);
}

/** @param {import("./phases.js").Segment} segment */
const isSeen = ({ seconds }) => seconds >= 1e-6;

/** Tokens first: they are exact, and times vary. None is set in proportion to another. @param {import("./conversation.js").Answer} answer */
function statement({ ending, usage, comparison, sources }) {
  const tokens = usage && `${count(usage.cached_tokens)} of ${counted(usage.prompt_tokens, "prompt token")} from the cache.`;
  const passages = sources?.length && `KV of ${counted(sources.length, "passage")}: ${originsText(sources)}.`;
  const method = ending && `Read by ${ending.method}: ${ending.reason}`;
  return [tokens, ending && times(ending, comparison), passages, method].filter(Boolean).join(" ");
}

/** @param {import("./chat.js").Ending} ending @param {import("./comparison.js").Comparison | null} [comparison] */
function times({ method, timings, estimate_s }, comparison) {
  if (method === "full") return "The prompt was read as text, without the passages' KV blocks.";
  if (comparison) {
    const { runs, own, full } = comparison;
    const medians = `${method} ${duration(own.ttft_s)}, full ${duration(full.ttft_s)}`;
    return `Time to the first token over these passages, median of ${runs} runs each: ${medians}.`;
  }
  const own = `Time to the first token without the search: ${duration(timings.ttft_s - timings.retrieve_s)} in this answer`;
  return estimate_s === null ? `${own}.` : `${own}; a full prefill is estimated at ${duration(estimate_s)}.`;
}

/** @param {Reading[]} found @returns {Node[]} */
function tableParts(found) {
  const head = found.map(({ label }) => element("th", { scope: "col" }, label));
  const totals = found.map(({ total_s }) => element("td", {}, duration(total_s)));
  return [
    element("caption", { class: "for-readers" }, "Time to the first token by phase"),
    element("thead", {}, element("tr", {}, element("th", { scope: "col" }, "phase"), ...head)),
    element("tbody", {}, ...Object.entries(PHASES).map(([name, says]) => tableRow(name, says, found))),
    element("tfoot", {}, element("tr", {}, element("th", { scope: "row" }, "first token"), ...totals)),
  ];
}

/** @param {string} name @param {string} says @param {Reading[]} found */
function tableRow(name, says, found) {
  const cells = found.map(({ segments }) => {
    const phase = segments.find((segment) => segment.name === name);
    return element("td", {}, phase ? duration(phase.seconds) : "–");
  });
  const head = element("th", { scope: "row" }, name, element("span", { class: "note" }, ` ${says}`));
  return element("tr", {}, head, ...cells);
}
