// A part of a turn that opens and closes; closed at first.

import { element } from "./dom.js";

export class Fold {
  #summary = element("summary");

  /** @param {string} name @param {...Node} body */
  constructor(name, ...body) {
    this.node = element("details", { class: `fold ${name}` }, this.#summary, element("div", { class: "fold-body" }, ...body));
  }

  /** @param {string} text @param {string} [beside] */
  title(text, beside = "") {
    if (this.#summary.textContent === text + beside) return;
    const note = beside ? [element("span", { class: "note" }, beside)] : [];
    this.#summary.replaceChildren(element("span", {}, text), ...note);
  }
}
