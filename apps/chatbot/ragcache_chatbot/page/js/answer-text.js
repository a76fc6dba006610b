// An answer's text as it grows: only blocks that changed are made again, so a selection in the others stays.

import { copyButton } from "./copy.js";
import { element } from "./dom.js";
import { blocks } from "./markdown.js";

export class AnswerText {
  node = element("div", { class: "answer" });
  /** The source of each block that is shown. @type {string[]} */
  #shown = [];

  /** @param {string} text */
  update(text) {
    const found = blocks(text);
    const same = found.findIndex(({ source }, i) => source !== this.#shown[i]);
    const kept = same < 0 ? found.length : same;
    while (this.node.children.length > kept) this.node.lastElementChild?.remove();
    for (const { show } of found.slice(kept)) this.node.append(...show().map(copyable));
    this.#shown = found.map(({ source }) => source);
  }
}

/** With a button at each piece of code. @param {HTMLElement} block */
function copyable(block) {
  const pieces = block.matches(".code") ? [block] : block.querySelectorAll(".code");
  for (const code of pieces) code.append(copyButton("the code", () => code.querySelector("code")?.textContent ?? ""));
  return block;
}
