// An answer's text as it grows: only blocks that changed are made again, so a selection in the others stays.

import { copyButton } from "./copy.js";
import { element } from "./dom.js";
import { blocks, markdown } from "./markdown.js";

export class AnswerText {
  node = element("div", { class: "answer" });
  /** The source of each block that is shown. @type {string[]} */
  #shown = [];

  /** @param {string} text */
  update(text) {
    const sources = blocks(text).map((lines) => lines.join("\n"));
    const same = sources.findIndex((source, i) => source !== this.#shown[i]);
    const kept = same < 0 ? sources.length : same;
    while (this.node.children.length > kept) this.node.lastElementChild?.remove();
    for (const source of sources.slice(kept)) this.node.append(...markdown(source).map(copyable));
    this.#shown = sources;
  }
}

/** With a button at each piece of code. @param {HTMLElement} block */
function copyable(block) {
  const pieces = block.matches(".code") ? [block] : block.querySelectorAll(".code");
  for (const code of pieces) code.append(copyButton("the code", () => code.querySelector("code")?.textContent ?? ""));
  return block;
}
