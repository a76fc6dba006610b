// The conversations that this browser keeps, each under a name of its own, so that two tabs do not overwrite each other's.

import { Conversation } from "./conversation.js";

const PREFIX = "ragcache.conversation";
const SHOWN = "ragcache.shown"; // in this tab

export class Conversations {
  /** What this tab showed before a reload, else the newest one. */
  current = new Conversation(sessionStorage.getItem(SHOWN) ?? kept()[0]?.name ?? newName());

  /** Those with questions, the newest first. @returns {Conversation[]} */
  list() {
    return kept().map((one) => (one.name === this.current.name ? this.current : one));
  }

  /** @param {string} [name] a new conversation by default */
  show(name = newName()) {
    if (name !== this.current.name) this.current = new Conversation(name);
    sessionStorage.setItem(SHOWN, name);
    return this.current;
  }

  /** @param {string} name */
  delete(name) {
    if (name === this.current.name) this.current.turns = []; // an answer that still comes keeps nothing
    localStorage.removeItem(name);
  }
}

/** @returns {Conversation[]} */
function kept() {
  const names = Object.keys(localStorage).filter((name) => name.startsWith(PREFIX));
  const found = names.map((name) => new Conversation(name));
  return found.filter(({ turns }) => turns.length).sort((a, b) => b.changed_ms - a.changed_ms);
}

/** `randomUUID` is there for pages of this machine and over HTTPS only. */
const newName = () => `${PREFIX}.${Date.now()}.${Math.floor(Math.random() * 1e9)}`;
