// The picture of the prefill: a bar for each way of reading the prompt, cut by phase, and the same as a table.

import { element, svg } from "./dom.js";
import { Fold } from "./fold.js";
import { duration } from "./format.js";
import { PHASES, readings } from "./phases.js";

const GAP = 0.4; // percent of the width, between segments

/** @typedef {import("./phases.js").Reading} Reading */

export class PrefillView {
  #picture = element("div", { class: "picture" });
  #measure = element("button", { type: "button", class: "small measure" });
  #trouble = element("p", { class: "trouble", role: "alert" });
  #table = element("table");
  #figures = element("details", { class: "figures-table" }, element("summary", {}, "Figures by phase"), this.#table);
  #fold = new Fold("prefill", this.#picture, this.#measure, this.#trouble, this.#figures);
  /** Running since the question was sent, while no token has come. */
  waited_s = 0;
  measuring = false;
  /** Why a full prefill could not be measured. */
  trouble = "";

  /** @param {() => void} measure runs a full prefill */
  constructor(measure) {
    this.node = this.#fold.node;
    this.#measure.addEventListener("click", () => this.measuring || measure());
  }

  /** @param {import("./conversation.js").Turn} turn */
  update(turn) {
    this.node.hidden = !turn.ending && turn.state !== "asking" && turn.first_token_s === null;
    if (this.node.hidden) return;
    const found = readings(turn);
    this.#fold.title(title(turn));
    this.#picture.replaceChildren(...(found.length ? picture(found) : [waiting(turn, turn.first_token_s ?? this.waited_s)]));
    this.#table.replaceChildren(...(found.length ? tableParts(found) : []));
    this.#figures.hidden = !found.length;
    this.#trouble.textContent = this.trouble;
    this.#trouble.hidden = !this.trouble;
    this.#measure.hidden = turn.state !== "done" || found.length < 1 || turn.ending?.method === "full";
    this.#measure.setAttribute("aria-disabled", String(this.measuring));
    this.#measure.textContent = this.measuring ? "Measuring …" : turn.full ? "Measure again" : "Measure a full prefill";
  }
}

/** @param {import("./conversation.js").Turn} turn */
function title({ ending, first_token_s }) {
  if (ending) return `First token after ${duration(ending.timings.ttft_s)}`;
  return first_token_s === null ? "Reading the prompt" : `First token seen after ${duration(first_token_s)}`;
}

/** @param {import("./conversation.js").Turn} turn @param {number} waited_s */
function waiting({ state, method, first_token_s }, waited_s) {
  const moving = state === "asking" && first_token_s === null;
  const track = element("div", { class: moving ? "track moving" : "track", "aria-hidden": "true" });
  return element("div", { class: "readings" }, row(method, track, duration(waited_s)));
}

/** @param {Reading[]} found */
function picture(found) {
  const longest_s = Math.max(...found.map(({ total_s }) => total_s), Number.EPSILON);
  const rows = found.map((reading) => row(reading.label, bar(reading, longest_s), duration(reading.total_s)));
  return [element("div", { class: "readings" }, ...rows), legend(found), element("p", { class: "verdict" }, verdict(found))];
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

/** @param {Reading[]} found */
function legend(found) {
  const seen = Object.entries(PHASES).filter(([name]) =>
    found.some(({ segments }) => segments.some((segment) => segment.name === name && isSeen(segment))),
  );
  const entries = seen.map(([name, says]) => element("li", { title: says }, swatch(name), name));
  return element("ul", { class: "legend", "aria-hidden": "true" }, ...entries);
}

/** @param {string} name */
function swatch(name) {
  const square = svg("rect", { class: `phase phase-${name}`, width: 10, height: 10, rx: 2 });
  return svg("svg", { width: 10, height: 10 }, square);
}

/** @param {import("./phases.js").Segment} segment */
const isSeen = ({ seconds }) => seconds >= 1e-6;

/** @param {Reading[]} found */
function verdict([own, full]) {
  if (!full) return own.label === "full" ? "The prompt was read as text, without the passages' KV blocks." : "";
  const ratio = full.reading_s / Math.max(own.reading_s, Number.EPSILON);
  const both = `Without the search: ${duration(own.reading_s)}, against ${duration(full.reading_s)} (${full.label})`;
  if (ratio >= 1.05) return `${both}: ${times(ratio)} as fast as a full prefill.`;
  if (ratio <= 0.95) return `${both}: here a full prefill is ${times(1 / ratio)} as fast.`;
  return `${both}: no difference here.`;
}

/** @param {number} ratio */
const times = (ratio) => `${ratio.toFixed(ratio < 10 ? 1 : 0)} times`;

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
