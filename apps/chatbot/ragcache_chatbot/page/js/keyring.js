// The API key: asked for when the server wants one, kept for this tab.

import { byId } from "./dom.js";

const STORED = "ragcache.key";

export class Keyring {
  /** @type {Promise<boolean> | null} */
  #asking = null;

  constructor() {
    byId("forget-key").addEventListener("click", () => this.forget());
    byId("key-cancel").addEventListener("click", () => byId("key-dialog").close("no"));
    this.#show();
  }

  /** @returns {string} "" where there is none */
  get key() {
    return sessionStorage.getItem(STORED) ?? "";
  }

  forget() {
    sessionStorage.removeItem(STORED);
    this.#show();
  }

  /**
   * Ask for a key after the server refused one. Requests that are refused at once share one dialog.
   * @param {string} refused the key that was sent, or ""
   * @returns {Promise<boolean>} whether there is another key to try
   */
  async renew(refused) {
    if (this.key !== refused && this.key) return true;
    this.#asking ??= this.#ask(refused).finally(() => (this.#asking = null));
    return this.#asking;
  }

  /** @param {string} refused @returns {Promise<boolean>} */
  #ask(refused) {
    const dialog = byId("key-dialog");
    byId("key-title").textContent = refused ? "The server did not accept this key" : "This server wants a key";
    byId("key").value = "";
    dialog.returnValue = "";
    dialog.showModal();
    byId("key").focus();
    return new Promise((resolve) => {
      dialog.addEventListener("close", () => resolve(this.#take(dialog.returnValue)), { once: true });
    });
  }

  /** @param {string} choice */
  #take(choice) {
    const key = byId("key").value.trim();
    byId("key").value = "";
    if (choice !== "yes" || !key) return false;
    sessionStorage.setItem(STORED, key);
    this.#show();
    return true;
  }

  #show() {
    byId("forget-key").hidden = !this.key;
  }
}
