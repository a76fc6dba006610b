// The list of conversations.

import { confirmed } from "./confirm.js";
import { byId, element } from "./dom.js";
import { icon } from "./icons.js";

/** @typedef {import("./conversation.js").Conversation} Conversation */

export class ConversationsView {
  /** What is listed. */
  #state = "";

  /**
   * @param {import("./conversations.js").Conversations} conversations
   * @param {(conversation: Conversation) => void} show another one is shown from now on
   */
  constructor(conversations, show) {
    this.conversations = conversations;
    this.show = show;
    byId("new-conversation").addEventListener("click", () => this.#open());
    addEventListener("storage", () => this.update()); // another tab has changed one
  }

  update() {
    const shown = this.conversations.current.name;
    const list = this.conversations.list();
    const state = JSON.stringify([shown, ...list.map(({ name, turns }) => [name, turns[0].question])]);
    if (state === this.#state) return; // whoever has the focus in the list keeps it
    this.#state = state;
    const items = list.map((conversation) => this.#item(conversation));
    byId("conversations-list").replaceChildren(...items);
    byId("conversations-none").hidden = items.length > 0;
  }

  /** @param {string} [name] a new one by default */
  #open(name) {
    this.show(this.conversations.show(name));
    this.update();
  }

  /** @param {Conversation} conversation */
  #item({ name, turns }) {
    const title = turns[0].question;
    const isShown = name === this.conversations.current.name;
    const open = element("button", { type: "button", class: "quiet title", title, onclick: () => this.#open(name) }, title);
    if (isShown) open.setAttribute("aria-current", "true");
    const onclick = () => void this.#delete(name, title);
    const remove = element("button", { type: "button", class: "bare", "aria-label": `Delete ${title}`, title: "Delete", onclick }, icon("delete"));
    return element("li", {}, open, remove);
  }

  /** @param {string} name @param {string} title */
  async #delete(name, title) {
    const text = "Its questions and answers are removed from this browser. Documents stay.";
    if (!(await confirmed(`Delete “${title.slice(0, 80)}”?`, text, "Delete"))) return;
    this.conversations.delete(name);
    if (name === this.conversations.current.name) this.#open();
    else this.update();
    byId("new-conversation").focus();
  }
}
