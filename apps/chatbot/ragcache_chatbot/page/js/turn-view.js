// One question with its answer, another method's beside it, and what can be done with them.

import { AnswerView } from "./answer-view.js";
import { copyButton } from "./copy.js";
import { element } from "./dom.js";
import { icon } from "./icons.js";
import { methodName } from "./method-names.js";

const EDIT = "Edit the question";

/**
 * What is asked unlike the settings.
 * @typedef {{earlier?: boolean, trim?: boolean}} Change
 */

/**
 * What the buttons of a turn do. `again`: ask its question, or another in its place; later turns go. `beside`: answer by
 * another method too. `measure`: compare an answer with a full prefill, or end the comparison that runs.
 * @typedef {object} TurnActions
 * @property {(change?: Change, question?: string) => void} again
 * @property {(method: string) => void} beside
 * @property {(answer: AnswerView) => void} measure
 * @property {() => string[]} methods that can be compared with
 */

export class TurnView {
  #last = true;
  #asked = element("span", { class: "asked" });
  #question = element("h3", { class: "question" }, this.#asked);
  #answers = element("div", { class: "answers" });
  #actions = element("div", { class: "turn-actions" });
  /** @type {AnswerView | null} */
  #beside = null;

  /**
   * @param {import("./conversation.js").Turn} turn
   * @param {TurnActions} actions
   */
  constructor(turn, actions) {
    this.turn = turn;
    this.actions = actions;
    this.answer = new AnswerView(turn, actions.measure);
    this.#asked.append(element("span", { class: "for-readers" }, "You: "), turn.question);
    this.#answers.append(this.answer.node);
    this.node = element("li", { class: "turn" }, this.#question, this.#answers, this.#actions);
    if (turn.beside) this.showBeside(turn.beside);
    this.update();
  }

  /** Show the turn as it is now. */
  update() {
    this.node.setAttribute("aria-busy", String(this.#isBusy));
    this.node.dataset.state = this.turn.state;
    this.answer.update();
    this.#beside?.update();
    this.#showActions();
  }

  /** Another method's answer, instead of one that is there. @param {import("./conversation.js").Answer} answer */
  showBeside(answer) {
    this.#beside?.node.remove();
    this.#beside = new AnswerView(answer, this.actions.measure);
    this.answer.name(this.turn.method ? methodName(this.turn.method) : "Recommended");
    this.#beside.name(methodName(answer.method));
    this.#answers.append(this.#beside.node);
    return this.#beside;
  }

  /** Another turn follows. */
  fold() {
    this.#last = false;
    this.answer.fold();
    this.#beside?.fold();
    this.#showActions();
  }

  get #isBusy() {
    return this.turn.state === "asking" || this.turn.beside?.state === "asking";
  }

  #showActions() {
    const { state, text } = this.turn;
    this.#actions.hidden = this.#isBusy;
    if (this.#isBusy) return;
    this.#actions.replaceChildren(
      ...(state === "failed" ? this.#waysOut() : []),
      ...(text ? [copyButton("the answer", () => this.turn.text)] : []),
      iconButton("edit", EDIT, () => this.#edit()),
      ...(this.#last && state !== "failed" ? [iconButton("again", "Ask again", () => this.actions.again())] : []),
      ...(state === "done" ? [this.#comparing()] : []),
    );
  }

  /** What may work where the question failed: asked again as it was, a prompt that is too long fails again. */
  #waysOut() {
    const { trouble, earlier, trim } = this.turn;
    /** @type {[string, Change][]} */
    const ways = trouble?.overflow ? [] : [["Try again", {}]];
    if (trouble?.overflow && earlier) ways.push(["Without earlier turns", { earlier: false }]);
    if (trouble?.overflow && !trim) ways.push(["Leave out what does not fit", { trim: true }]);
    return ways.map(([words, change]) => {
      const onclick = () => this.actions.again(change);
      return element("button", { type: "button", class: "small", onclick }, icon("again"), words);
    });
  }

  /** Which method to compare with. */
  #comparing() {
    const own = this.turn.ending?.method;
    const options = this.actions.methods().filter((name) => name !== own).map((name) => element("option", { value: name }, methodName(name)));
    const first = element("option", { value: "" }, "Compare with…");
    const picker = element("select", { class: "compare", "aria-label": "Compare with" }, first, ...options);
    picker.addEventListener("change", () => this.actions.beside(picker.value));
    return picker;
  }

  /** The question as a form: sent, it takes this turn's place. */
  #edit() {
    const box = element("textarea", { rows: 2, value: this.turn.question, "aria-label": EDIT });
    const done = () => {
      this.#question.replaceChildren(this.#asked);
      this.#actions.querySelector(`[title="${EDIT}"]`)?.focus();
    };
    const later = this.#last ? "" : "The turns below are removed.";
    const form = element(
      "form",
      { class: "edit" },
      box,
      element("p", { class: "note" }, later),
      element("button", { type: "button", class: "quiet", onclick: done }, "Cancel"),
      element("button", { type: "submit", class: "primary" }, "Ask this"),
    );
    form.addEventListener("submit", (/** @type {SubmitEvent} */ event) => {
      event.preventDefault();
      if (box.value.trim()) this.actions.again({}, box.value.trim());
    });
    form.addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => {
      if (event.key === "Escape") done();
    });
    this.#question.replaceChildren(form);
    box.focus();
  }
}

/** @param {string} name of the icon @param {string} words @param {() => void} onclick */
function iconButton(name, words, onclick) {
  return element("button", { type: "button", class: "bare", "aria-label": words, title: words, onclick }, icon(name));
}
