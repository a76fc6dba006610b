// One line that opens what it sums up; closed at first.

import { element } from "./dom.js";
import { icon } from "./icons.js";

export class Fold {
  #title = element("span");

  /** @param {string} name @param {...Node} body */
  constructor(name, ...body) {
    const summary = element("summary", {}, this.#title, icon("chevron"));
    this.node = element("details", { class: `fold ${name}` }, summary, element("div", { class: "fold-body" }, ...body));
  }

  /** @param {string} text */
  title(text) {
    if (this.#title.textContent !== text) this.#title.textContent = text;
  }
}
