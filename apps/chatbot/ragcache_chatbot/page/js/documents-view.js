// The list of documents by folder: found by name, with a button to delete each.

import { confirmed } from "./confirm.js";
import { byId, element } from "./dom.js";
import { count, counted } from "./format.js";
import { icon } from "./icons.js";
import { troubleBox } from "./trouble.js";

const PAGE = 50;
const PAUSE_MS = 250; // between the last key and the search

/** @typedef {import("./documents.js").Document} Document */

export class DocumentsView {
  /** @type {Document[]} */
  #shown = [];
  #total = 0;
  /** Where the next page of the server's list begins. */
  #offset = 0;
  /** What is searched for; "" for all. */
  #name = "";
  /** Folders that were closed. @type {Set<string>} */
  #closed = new Set();
  /** The last listing that was begun; those before it come too late. */
  #listing = 0;

  /**
   * @param {import("./documents.js").Documents} documents
   * @param {() => void} changed a document was deleted
   */
  constructor(documents, changed) {
    this.documents = documents;
    this.changed = changed;
    /** @type {number | undefined} */
    let timer;
    byId("find").addEventListener("input", () => {
      clearTimeout(timer);
      timer = setTimeout(() => void this.#find(), PAUSE_MS);
    });
  }

  /** List from the start. Raises ApiError, ConnectionError. @param {string[]} [first] ids of documents to put before the others */
  async refresh(first = []) {
    const listing = ++this.#listing;
    const early = await Promise.all(first.slice(0, PAGE).map((id) => this.documents.get(id)));
    const page = await this.#page(0);
    if (listing !== this.#listing) return;
    this.#shown = early;
    this.#offset = 0;
    this.#add(page);
  }

  async #find() {
    const typed = byId("find").value.trim().replaceAll(/\s+/g, "*");
    try {
      this.#name = typed;
      await this.refresh();
      // Names of files are often in small letters, and titles are not.
      if (this.#total || typed === typed.toLowerCase()) return;
      this.#name = typed.toLowerCase();
      await this.refresh();
    } catch (error) {
      byId("documents-news").replaceChildren(troubleBox(error, () => void this.#find()));
    }
  }

  /** @param {number} offset */
  #page(offset) {
    return this.documents.list(offset, PAGE, this.#name);
  }

  /** @param {{data: Document[], total: number}} page */
  #add({ data, total }) {
    const known = new Set(this.#shown.map(({ id }) => id));
    this.#shown.push(...data.filter(({ id }) => !known.has(id)));
    this.#offset += data.length;
    this.#total = total;
    this.#show();
  }

  #show() {
    byId("documents-title").textContent = this.#name ? `${count(this.#total)} found` : counted(this.#total, "document");
    const none = this.#name ? "No document has this in its name." : "There are none yet. Add some, and ask about them.";
    const list = this.#shown.length ? this.#folders() : [element("p", { class: "note" }, none)];
    byId("documents-list").replaceChildren(...list, ...(this.#offset < this.#total ? [this.#moreButton()] : []));
  }

  #folders() {
    /** @type {Map<string, Document[]>} */
    const folders = new Map();
    for (const document of this.#shown) {
      const folder = document.id.slice(0, Math.max(0, document.id.lastIndexOf("/")));
      folders.set(folder, [...(folders.get(folder) ?? []), document]);
    }
    return [...folders].map(([folder, held]) => this.#folder(folder, element("ul", {}, ...held.map((one) => this.#item(one)))));
  }

  /** @param {string} path "" for documents in no folder @param {HTMLElement} list */
  #folder(path, list) {
    if (!path) return list;
    const name = path.slice(path.lastIndexOf("/") + 1);
    const made = element("details", { class: "folder", open: !this.#closed.has(path) }, element("summary", { title: path }, icon("folder"), name), list);
    made.addEventListener("toggle", () => (made.open ? this.#closed.delete(path) : this.#closed.add(path)));
    return made;
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
    const listing = ++this.#listing;
    try {
      const page = await this.#page(this.#offset);
      if (listing !== this.#listing) return;
      this.#add(page);
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
