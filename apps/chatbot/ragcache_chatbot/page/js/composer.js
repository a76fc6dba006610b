// Where questions are written. Enter sends, Shift and Enter start a line, Esc stops.

import { announce } from "./announcer.js";
import { byId } from "./dom.js";

export class Composer {
  /** @param {{ask: (question: string) => void, stop: () => void, busy: () => boolean}} actions */
  constructor(actions) {
    this.actions = actions;
    byId("composer").addEventListener("submit", (/** @type {SubmitEvent} */ event) => {
      event.preventDefault();
      this.#send();
    });
    byId("question").addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => this.#onKey(event));
    byId("question").addEventListener("input", fit);
    byId("stop").addEventListener("click", actions.stop);
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && actions.busy() && !document.querySelector("dialog[open]")) actions.stop();
    });
  }

  /** @param {boolean} busy */
  busy(busy) {
    const [shown, gone] = busy ? [byId("stop"), byId("send")] : [byId("send"), byId("stop")];
    const held = document.activeElement === gone;
    shown.hidden = false;
    gone.hidden = true;
    if (held) shown.focus();
  }

  /** @param {string} question */
  write(question) {
    byId("question").value = question;
    byId("question").focus();
    fit();
  }

  /** @param {KeyboardEvent} event */
  #onKey(event) {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    this.#send();
  }

  #send() {
    const question = byId("question").value.trim();
    if (!question) return byId("question").focus();
    if (this.actions.busy()) return announce("An answer is still coming. Esc stops it.");
    this.write("");
    this.actions.ask(question);
  }
}

/** As high as what is written in it. */
function fit() {
  const box = byId("question");
  box.style.height = "auto";
  box.style.height = `${box.scrollHeight}px`;
}
