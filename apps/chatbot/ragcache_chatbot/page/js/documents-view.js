// The list of documents, with a button to delete each.

import { confirmed } from "./confirm.js";
import { byId, element } from "./dom.js";
import { count, counted } from "./format.js";
import { icon } from "./icons.js";
import { troubleBox } from "./store-view.js";

const PAGE = 50;

/** @typedef {import("./documents.js").Document} Document */

export class DocumentsView {
  /** @type {Document[]} */
  #shown = [];
  #total = 0;
  /** Where the next page of the server's list begins. */
  #offset = 0;

  /**
   * @param {import("./documents.js").Documents} documents
   * @param {() => void} changed a document was deleted
   */
  constructor(documents, changed) {
    this.documents = documents;
    this.changed = changed;
  }

  /** List from the start. @param {string[]} [first] ids of documents to put before the others */
  async refresh(first = []) {
    try {
      const early = await Promise.all(first.slice(0, PAGE).map((id) => this.documents.get(id)));
      this.#shown = early;
      this.#offset = 0;
      await this.#nextPage();
    } catch (error) {
      byId("documents-list").replaceChildren(troubleBox(error, () => void this.refresh(first)));
    }
  }

  async #nextPage() {
    const { data, total } = await this.documents.list(this.#offset, PAGE);
    const known = new Set(this.#shown.map(({ id }) => id));
    this.#shown.push(...data.filter(({ id }) => !known.has(id)));
    this.#offset += data.length;
    this.#total = total;
    this.#show();
  }

  #show() {
    byId("documents-title").textContent = this.#total ? counted(this.#total, "document") : "Documents";
    const items = this.#shown.map((document) => this.#item(document));
    const none = element("p", { class: "note" }, "There are none yet. Add some, and ask about them.");
    const list = items.length ? element("ul", {}, ...items) : none;
    byId("documents-list").replaceChildren(list, ...(this.#offset < this.#total ? [this.#moreButton()] : []));
  }

  /** @param {Document} document */
  #item(document) {
    const name = document.title || document.source || document.id;
    const state = ["ready", "complete"].includes(document.state) ? "" : `, ${document.state}`;
    const facts = `${counted(document.chunks, "passage")}, ${counted(document.tokens, "token")}${state}`;
    const onclick = () => void this.#delete(document, name);
    const button = element("button", { type: "button", class: "bare", "aria-label": `Delete ${name}`, title: "Delete", onclick }, icon("delete"));
    const text = element("span", { title: document.id }, element("b", {}, name), element("span", { class: "note" }, facts));
    return element("li", {}, text, button);
  }

  #moreButton() {
    const words = `Show more (${count(this.#total - this.#shown.length)})`;
    const onclick = () => void this.#more();
    return element("button", { type: "button", class: "small more", onclick }, words);
  }

  async #more() {
    const from = this.#shown.length;
    try {
      await this.#nextPage();
      byId("documents-list").querySelectorAll("li button")[from]?.focus();
    } catch (error) {
      byId("documents-news").replaceChildren(troubleBox(error, null));
    }
  }

  /** @param {Document} document @param {string} name */
  async #delete(document, name) {
    const text = `Its text, its embedding and its KV are deleted: ${counted(document.chunks, "passage")}. This cannot be undone.`;
    if (!(await confirmed(`Delete ${name}?`, text, "Delete"))) return;
    try {
      await this.documents.delete(document.id);
    } catch (error) {
      byId("documents-news").replaceChildren(troubleBox(error, () => void this.#delete(document, name)));
      return;
    }
    const index = this.#shown.indexOf(document);
    this.#shown.splice(index, 1);
    this.#offset -= 1;
    this.#total -= 1;
    this.#show();
    byId("documents-news").replaceChildren(element("p", { class: "good" }, `${name} was deleted.`));
    const buttons = byId("documents-list").querySelectorAll("li button");
    (buttons[Math.min(index, buttons.length - 1)] ?? byId("documents-list")).focus();
    this.changed();
  }
}
