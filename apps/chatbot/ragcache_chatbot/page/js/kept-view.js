// The conversations that the server keeps: those of programs over its API. What is asked on this page stays in the browser.

import { confirmed } from "./confirm.js";
import { asking } from "./conversation.js";
import { byId, element } from "./dom.js";
import { icon } from "./icons.js";
import { troubleBox } from "./trouble.js";

const PATH = "v1/conversations";
const MOST = 50;
const PAUSE_MS = 250; // between the last letter of a search and its request

/** @typedef {{type: string, role?: string, content?: {text?: string}[], conversation_id?: string}} Item */
/** @typedef {{id: string, title: string}} Kept */

export class KeptView {
  /** Which listing is the newest. */
  #listing = 0;

  /**
   * @param {import("./api.js").Api} api
   * @param {(id: string, turns: import("./conversation.js").Turn[]) => void} show one is shown from now on
   */
  constructor(api, show) {
    this.api = api;
    this.show = show;
    let pause = 0;
    byId("kept-find").addEventListener("input", () => {
      clearTimeout(pause);
      pause = setTimeout(() => void this.#told(() => this.refresh()), PAUSE_MS);
    });
  }

  /** Raises ApiError, ConnectionError. */
  async refresh() {
    const listing = ++this.#listing;
    const words = byId("kept-find").value.trim();
    const found = words ? await this.#search(words) : await this.#list();
    if (listing !== this.#listing) return;
    byId("kept-list").replaceChildren(...found.map((one) => this.#item(one)));
    byId("kept-news").replaceChildren(words && !found.length ? element("p", { class: "note" }, "None holds these words.") : "");
    if (!words) byId("kept").hidden = !found.length;
  }

  /** @returns {Promise<Kept[]>} */
  async #list() {
    const { data } = await this.api.json(`${PATH}?limit=${MOST}`);
    return Promise.all(data.map(async (/** @type {any} */ { id, metadata, created_at }) => {
      const title = metadata.title || (await this.#firstWords(id)) || new Date(created_at * 1000).toLocaleString();
      return { id, title };
    }));
  }

  /** @param {string} id */
  async #firstWords(id) {
    const { data } = await this.api.json(`${PATH}/${id}/items?order=asc&limit=1`);
    return data.length ? words(data[0]) : "";
  }

  /** @param {string} query @returns {Promise<Kept[]>} each conversation once, by its newest item with the words */
  async #search(query) {
    const { data } = await this.api.json(`${PATH}/search?limit=${MOST}&query=${encodeURIComponent(query)}`);
    const found = new Map();
    for (const item of data) if (!found.has(item.conversation_id)) found.set(item.conversation_id, words(item));
    return [...found].map(([id, title]) => ({ id, title }));
  }

  /** @param {Kept} kept */
  #item({ id, title }) {
    const open = element("button", { type: "button", class: "quiet title", title, onclick: () => void this.#told(() => this.#open(id)) }, title);
    const act = (/** @type {string} */ verb, /** @type {string} */ drawn, /** @type {() => Promise<void>} */ run) =>
      element("button", { type: "button", class: "bare", "aria-label": `${verb} ${title}`, title: verb, onclick: () => void this.#told(run) }, icon(drawn));
    return element("li", {}, open, act("Export", "export", () => this.#export(id)), act("Delete", "delete", () => this.#delete(id, title)));
  }

  /** @param {string} id */
  async #open(id) {
    const { items } = await this.api.json(`${PATH}/${id}/export`);
    this.show(id, turnsOf(items));
  }

  /** The request has a key, which a plain link has not. @param {string} id */
  async #export(id) {
    const text = JSON.stringify(await this.api.json(`${PATH}/${id}/export`), null, 1);
    const href = URL.createObjectURL(new Blob([text], { type: "application/json" }));
    element("a", { href, download: `${id}.json` }).click();
    URL.revokeObjectURL(href);
  }

  /** @param {string} id @param {string} title */
  async #delete(id, title) {
    const text = "Its questions and answers are deleted from the server. This cannot be undone.";
    if (!(await confirmed(`Delete “${title.slice(0, 80)}”?`, text, "Delete"))) return;
    await this.api.json(`${PATH}/${id}`, { method: "DELETE" });
    await this.refresh();
    byId("kept-find").focus();
  }

  /** @param {() => Promise<void>} run */
  async #told(run) {
    try {
      await run();
    } catch (error) {
      byId("kept-news").replaceChildren(troubleBox(error, () => void this.#told(run)));
    }
  }
}

/** @param {Item} item */
const words = ({ content = [] }) => content.map(({ text = "" }) => text).join("").trim();

/** Messages as questions, each with what was answered to it. @param {Item[]} items */
function turnsOf(items) {
  /** @type {import("./conversation.js").Turn[]} */
  const turns = [];
  for (const item of items.filter(({ type }) => type === "message")) {
    const last = turns.at(-1);
    if (item.role === "user") turns.push({ ...asking(""), state: "done", question: words(item), earlier: true, trim: false });
    else if (item.role === "assistant" && last) last.text += (last.text && "\n\n") + words(item);
  }
  return turns;
}
