// The passages that an answer was read from: a chip each, which opens the passage.

import { element } from "./dom.js";
import { counted } from "./format.js";
import { icon } from "./icons.js";

/** Where keys and values came from: how it is said, and why. Another word of the server is shown as it is. */
const ORIGINS = {
  device: ["on the device", "Its KV was on the model's device already."],
  memory: ["from memory", "Its KV was in host memory."],
  disk: ["from disk", "Its KV was read from the store on disk."],
  remote: ["from afar", "Its KV was read from the store that several machines share."],
  computed: ["computed now", "Its KV was in no tier: the model read the passage for this question. It is kept."],
  shared: ["shared", "Another question over the same passages had placed their KV."],
  exact: ["from an earlier prompt", "An earlier prompt began with the same tokens: their KV was kept as it was."],
  unused: ["KV unused", "The method read the passage's text."],
};

let made = 0; // so that every passage has an id of its own

/** @typedef {import("./chat.js").Source} Source */

/** @param {string} kv @returns {string[]} */
const origin = (kv) => ORIGINS[/** @type {keyof typeof ORIGINS} */ (kv)] ?? [kv, ""];

/** A document without a title is called by its file or its URL. @param {Source} source */
export const nameOf = ({ title, source, chunk_id }) => title || (/^https?:/.test(source) ? source : source.replace(/^.*\/(?=.)/, "")) || chunk_id;

/** The name and, where it is known, the place in it: "Travel policy, p. 3". @param {Source} source */
export const labelOf = (source) => [nameOf(source), source.place].filter(Boolean).join(", ");

/** @param {Source[]} sources @returns {string} such as "3 from memory, 1 computed now" */
export function originsText(sources) {
  /** @type {Map<string, number>} */
  const tally = new Map();
  for (const { kv } of sources) tally.set(kv, (tally.get(kv) ?? 0) + 1);
  return [...tally].map(([kv, number]) => `${number} ${origin(kv)[0]}`).join(", ");
}

export class SourcesView {
  node = element("div", { class: "sources", role: "group", "aria-label": "Sources" });
  /** @type {HTMLElement[]} */
  #passages = [];
  /** @type {HTMLElement[]} */
  #chips = [];
  /** @type {Source[] | null} */
  #shown = null;

  /** @param {Source[] | null} sources */
  update(sources) {
    this.node.hidden = !sources;
    if (!sources || sources === this.#shown) return;
    this.#shown = sources;
    this.#passages = sources.map((source) => passage(source, () => this.close()));
    this.#chips = sources.map((source, i) => chip(i + 1, source, this.#passages[i].id, () => this.#toggle(i)));
    const chips = element("ol", { class: "chips" }, ...this.#chips.map((one) => element("li", {}, one)));
    this.node.replaceChildren(...(sources.length ? [chips, ...this.#passages] : [element("p", { class: "note" }, "No passage was found.")]));
  }

  /** Show one passage, and no other. @param {number} index */
  open(index) {
    this.close();
    this.#passages[index].hidden = false;
    this.#chips[index].setAttribute("aria-expanded", "true");
    this.#passages[index].scrollIntoView({ block: "nearest" });
  }

  close() {
    for (const one of this.#passages) one.hidden = true;
    for (const one of this.#chips) one.setAttribute("aria-expanded", "false");
  }

  /** @param {number} index */
  #toggle(index) {
    if (this.#passages[index].hidden) this.open(index);
    else this.close();
  }
}

/** @param {number} number @param {Source} source @param {string} id of the passage @param {() => void} onclick */
function chip(number, source, id, onclick) {
  const settings = { type: "button", class: "chip", title: labelOf(source), "aria-expanded": "false", "aria-controls": id, onclick };
  const place = source.place ? [element("span", { class: "chip-place" }, source.place)] : [];
  return element("button", settings, element("b", {}, String(number)), element("span", { class: "chip-name" }, nameOf(source)), ...place);
}

/** @param {Source} source @param {() => void} close */
function passage(source, close) {
  const [words, why] = origin(source.kv);
  const facts = [source.score === null ? "" : `score ${source.score.toFixed(2)}`, counted(source.tokens, "token")];
  const button = element("button", { type: "button", class: "bare", "aria-label": "Close the passage", onclick: close }, icon("close"));
  const head = element(
    "header",
    {},
    element("h4", { class: "passage-name" }, labelOf(source)),
    element("span", { class: "passage-facts" }, facts.filter(Boolean).join(", ")),
    element("span", { class: `kv kv-${source.kv in ORIGINS ? source.kv : "other"}` }, words),
    button,
  );
  const note = element("p", { class: "note" }, [source.source, why].filter(Boolean).join(" · "));
  return element("div", { class: "passage", id: `passage-${++made}`, hidden: true }, head, element("blockquote", {}, source.text), note);
}
