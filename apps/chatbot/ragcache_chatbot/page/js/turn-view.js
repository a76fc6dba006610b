// One question with its answer and everything that is known about it.

import { element } from "./dom.js";
import { Fold } from "./fold.js";
import { counted } from "./format.js";
import { PrefillView } from "./prefill-view.js";
import { originsText, sourcesView } from "./sources-view.js";

/**
 * What the buttons of a turn do.
 * @typedef {object} TurnActions
 * @property {(turn: import("./conversation.js").Turn, change: {earlier?: boolean, trim?: boolean}) => void} again
 * @property {(view: TurnView) => void} measure
 */

export class TurnView {
  #last = true;
  #answer = element("div", { class: "answer" });
  #note = element("p", { class: "turn-note" });
  #trouble = element("div", { class: "trouble", role: "alert" });
  #actions = element("div", { class: "turn-actions" });
  #passages = element("div");
  #sources = new Fold("passages", this.#passages);
  /** @type {import("./chat.js").Source[] | null} */
  #shownSources = null;

  /**
   * @param {import("./conversation.js").Turn} turn
   * @param {TurnActions} actions
   */
  constructor(turn, actions) {
    this.turn = turn;
    this.actions = actions;
    this.prefill = new PrefillView(() => actions.measure(this));
    const asked = element("span", { class: "asked" }, element("span", { class: "for-readers" }, "You: "), turn.question);
    const question = element("h3", { class: "question" }, asked);
    const below = [this.#note, this.#trouble, this.#sources.node, ...this.prefill.nodes, this.#actions];
    this.node = element("li", { class: "turn" }, question, this.#answer, ...below);
    this.#sources.node.open = true;
    this.update();
  }

  /** Show the turn as it is now. */
  update() {
    this.node.setAttribute("aria-busy", String(this.turn.state === "asking"));
    this.node.dataset.state = this.turn.state;
    this.updateText();
    this.#showNote();
    this.#showTrouble();
    this.#showActions();
    this.updatePrefill();
    this.#showSources();
  }

  /** Only the answer's text: for every token. */
  updateText() {
    this.#answer.textContent = this.turn.text;
    this.#answer.hidden = !this.turn.text && this.turn.state !== "asking";
  }

  /** Only the picture of the prefill: while its clock runs. */
  updatePrefill() {
    this.prefill.update(this.turn);
  }

  /** Another turn follows: close what is of interest for the newest one. */
  fold() {
    this.#last = false;
    this.prefill.close();
    this.#sources.node.open = false;
    this.#showActions();
  }

  #showNote() {
    this.#note.textContent = noteText(this.turn);
    this.#note.hidden = !this.#note.textContent;
  }

  #showTrouble() {
    const { trouble } = this.turn;
    this.#trouble.hidden = !trouble;
    const lines = trouble ? [element("strong", {}, trouble.message), element("span", {}, trouble.advice)] : [];
    this.#trouble.replaceChildren(...lines);
  }

  #showActions() {
    const shown = this.#last && this.turn.state !== "asking" ? this.#offers() : [];
    if (this.turn.trouble) this.#trouble.after(this.#actions);
    else this.node.append(this.#actions);
    this.#actions.replaceChildren(...shown.map(([words, change]) => this.#again(words, change)));
    this.#actions.hidden = !shown.length;
  }

  /** @returns {[string, {earlier?: boolean, trim?: boolean}][]} */
  #offers() {
    const { state, trouble, earlier, trim } = this.turn;
    /** @type {[string, {earlier?: boolean, trim?: boolean}][]} */
    const offers = [[state === "failed" ? "Try again" : "Ask again", {}]];
    if (trouble?.overflow && earlier) offers.push(["Without earlier turns", { earlier: false }]);
    if (trouble?.overflow && !trim) offers.push(["Leave out what does not fit", { trim: true }]);
    return offers;
  }

  /** @param {string} words @param {{earlier?: boolean, trim?: boolean}} change */
  #again(words, change) {
    const onclick = () => this.actions.again(this.turn, change);
    return element("button", { type: "button", class: "small", onclick }, words);
  }

  #showSources() {
    const { sources } = this.turn;
    this.#sources.node.hidden = !sources;
    if (!sources || sources === this.#shownSources) return;
    this.#shownSources = sources;
    this.#sources.title(`${counted(sources.length, "passage")} read`, originsText(sources));
    const shown = sources.length ? sourcesView(sources) : element("p", { class: "note" }, "No passage was found.");
    this.#passages.replaceChildren(shown);
  }
}

/** @param {import("./conversation.js").Turn} turn */
function noteText({ state, text, ending }) {
  if (state === "stopped") return text ? "Stopped before the end." : "Stopped before the first word.";
  if (state !== "done" || !ending) return "";
  const parts = [
    text ? "" : "The model gave no words",
    ending.dropped ? `${counted(ending.dropped, "passage")} left out: they did not fit` : "",
    ending.finish_reason === "length" ? "cut at the longest answer allowed" : "",
  ];
  return parts.filter(Boolean).join(" · ");
}
