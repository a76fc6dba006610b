// One question with its answer, and what can be done with it.

import { AnswerView } from "./answer-view.js";
import { element } from "./dom.js";
import { icon } from "./icons.js";

/**
 * What is asked unlike the settings.
 * @typedef {{earlier?: boolean, trim?: boolean}} Change
 */

/**
 * What the buttons of a turn do.
 * @typedef {object} TurnActions
 * @property {(turn: import("./conversation.js").Turn, change: Change) => void} again
 * @property {() => void} measure compares with a full prefill, or ends the comparison that runs
 */

export class TurnView {
  #last = true;
  #actions = element("div", { class: "turn-actions" });

  /**
   * @param {import("./conversation.js").Turn} turn
   * @param {TurnActions} actions
   */
  constructor(turn, actions) {
    this.turn = turn;
    this.actions = actions;
    this.answer = new AnswerView(turn, actions.measure);
    const asked = element("span", { class: "asked" }, element("span", { class: "for-readers" }, "You: "), turn.question);
    const question = element("h3", { class: "question" }, asked);
    this.node = element("li", { class: "turn" }, question, this.answer.node, this.#actions);
    this.update();
  }

  /** Show the turn as it is now. */
  update() {
    this.node.setAttribute("aria-busy", String(this.turn.state === "asking"));
    this.node.dataset.state = this.turn.state;
    this.answer.update();
    this.#showActions();
  }

  /** Another turn follows. */
  fold() {
    this.#last = false;
    this.answer.fold();
    this.#showActions();
  }

  #showActions() {
    const shown = this.#last && this.turn.state !== "asking" ? this.#offers() : [];
    this.#actions.replaceChildren(...shown.map(([words, change]) => this.#again(words, change)));
    this.#actions.hidden = !shown.length;
  }

  /** @returns {[string, Change][]} */
  #offers() {
    const { state, trouble, earlier, trim } = this.turn;
    /** @type {[string, Change][]} */
    const offers = [[state === "failed" ? "Try again" : "Ask again", {}]];
    if (trouble?.overflow && earlier) offers.push(["Without earlier turns", { earlier: false }]);
    if (trouble?.overflow && !trim) offers.push(["Leave out what does not fit", { trim: true }]);
    return offers;
  }

  /** @param {string} words @param {Change} change */
  #again(words, change) {
    const onclick = () => this.actions.again(this.turn, change);
    return element("button", { type: "button", class: "small", onclick }, icon("again"), words);
  }
}
