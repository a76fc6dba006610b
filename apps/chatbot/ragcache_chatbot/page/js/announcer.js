// What a screen reader says. An answer is spoken by whole sentences, with pauses, never token by token.

import { byId } from "./dom.js";

const PAUSE_MS = 2500;

/** @param {string} text */
export function announce(text) {
  byId("announcer").textContent = text;
}

export class SpokenAnswer {
  #pending = "";
  #spoken_ms = 0;

  /** @param {string} text */
  add(text) {
    this.#pending += text;
    const end = this.#pending.search(/[.!?…]\s+\S*$/);
    if (end < 0 || performance.now() - this.#spoken_ms < PAUSE_MS) return;
    this.#say(this.#pending.slice(0, end + 1));
    this.#pending = this.#pending.slice(end + 1);
  }

  /** @param {string} [closing] said behind what is left */
  finish(closing = "") {
    this.#say(`${this.#pending} ${closing}`.trim());
    this.#pending = "";
  }

  /** @param {string} text */
  #say(text) {
    if (text) announce(text);
    this.#spoken_ms = performance.now();
  }
}
