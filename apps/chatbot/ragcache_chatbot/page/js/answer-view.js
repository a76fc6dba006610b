// One answer with everything that is known about it: text, sources, costs.

import { AnswerText } from "./answer-text.js";
import { cite } from "./citations.js";
import { element } from "./dom.js";
import { Fold } from "./fold.js";
import { counted } from "./format.js";
import { PrefillView } from "./prefill-view.js";
import { labelOf, nameOf, SourcesView } from "./sources-view.js";

/** @typedef {import("./conversation.js").Answer} Answer */

export class AnswerView {
  #name = element("h4", { class: "answer-name", hidden: true });
  #thoughts = element("p", { class: "thoughts" });
  #thinking = new Fold("thinking", this.#thoughts);
  #text = new AnswerText();
  #note = element("p", { class: "turn-note" });
  #trouble = element("div", { class: "trouble", role: "alert" });
  #sources = new SourcesView();
  #isCited = false;

  /**
   * @param {Answer} answer
   * @param {(view: AnswerView) => void} measure compares with a full prefill, or ends the comparison that runs
   */
  constructor(answer, measure) {
    this.answer = answer;
    this.prefill = new PrefillView(() => measure(this));
    const parts = [this.#name, this.#thinking.node, this.#text.node, this.#note, this.#trouble, this.#sources.node, ...this.prefill.nodes];
    this.node = element("div", { class: "answer-part" }, ...parts);
    this.update();
  }

  /** Where another answer stands beside it. @param {string} name */
  name(name) {
    this.#name.textContent = name;
    this.#name.hidden = false;
  }

  /** Show the answer as it is now. */
  update() {
    this.node.dataset.state = this.answer.state;
    this.updateText();
    this.#note.textContent = noteText(this.answer);
    this.#note.hidden = !this.#note.textContent;
    this.#showTrouble();
    this.#sources.update(this.answer.sources);
    this.#cite();
    this.updatePrefill();
  }

  /** Only the text: for every token. */
  updateText() {
    this.#text.update(this.answer.text);
    const { text, thoughts, thought_s, state } = this.answer;
    this.#text.node.hidden = !text && (state !== "asking" || !!thoughts);
    this.#thinking.node.hidden = !thoughts;
    this.#thinking.title(thought_s ? `Thought for ${thought_s.toFixed(1)} s` : state === "asking" && !text ? "Thinking\u2026" : "Thought");
    this.#thoughts.textContent = thoughts ?? "";
  }

  /** Only the costs: while their clock runs. */
  updatePrefill() {
    this.prefill.update(this.answer);
  }

  /** Another turn follows: close what is of interest for the newest one. */
  fold() {
    this.prefill.close();
    this.#sources.close();
  }

  #showTrouble() {
    const { trouble } = this.answer;
    this.#trouble.hidden = !trouble;
    const lines = trouble ? [element("strong", {}, trouble.message), element("span", {}, trouble.advice)] : [];
    this.#trouble.replaceChildren(...lines);
  }

  /** Once nothing is added to the text any more. */
  #cite() {
    const { state, sources } = this.answer;
    if (this.#isCited || state === "asking" || !sources?.length) return;
    this.#isCited = true;
    const texts = sources.map((source) => `${nameOf(source)} ${source.text}`);
    cite(this.#text.node, sources.map(labelOf), texts, (passage) => this.#sources.open(passage));
  }
}

/** @param {Answer} answer */
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
