// Conversations and panels: beside the conversation where there is room, else in its place, opened by a button each.

import { byId } from "./dom.js";
import { icon } from "./icons.js";

/** The button that opens each, what it says, and its icon. */
const DRAWERS = {
  conversations: ["open-conversations", "Conversations", "menu"],
  panels: ["open-panels", "Documents and settings", "panel"],
};

export function prepareDrawers() {
  for (const [name, [id]] of Object.entries(DRAWERS)) {
    const button = byId(id);
    const isOpen = () => button.getAttribute("aria-expanded") === "true";
    button.addEventListener("click", () => show(isOpen() ? "" : name));
    byId(name).addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => {
      if (event.key !== "Escape" || !isOpen()) return;
      closeDrawers();
      button.focus();
    });
  }
}

export function closeDrawers() {
  show("");
}

/** @param {string} shown "" for none */
function show(shown) {
  for (const [name, [id, words, image]] of Object.entries(DRAWERS)) {
    const isOpen = name === shown;
    document.body.classList.toggle(`${name}-open`, isOpen);
    byId(id).setAttribute("aria-expanded", String(isOpen));
    byId(id).setAttribute("aria-label", isOpen ? "Back" : words);
    byId(id).replaceChildren(icon(isOpen ? "close" : image));
  }
}
