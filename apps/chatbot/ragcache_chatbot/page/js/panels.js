// Settings and documents: beside the conversation where there is room, else over it, opened by a button.

import { byId } from "./dom.js";
import { icon } from "./icons.js";
import { prepareTabs } from "./tabs.js";

export function preparePanels() {
  prepareTabs();
  const button = byId("open-panels");
  const show = (/** @type {boolean} */ open) => {
    document.body.classList.toggle("panels-open", open);
    button.setAttribute("aria-expanded", String(open));
    button.setAttribute("aria-label", open ? "Back" : "Documents and settings");
    button.replaceChildren(icon(open ? "close" : "panel"));
  };
  button.addEventListener("click", () => show(button.getAttribute("aria-expanded") !== "true"));
  byId("panels").addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => {
    if (event.key !== "Escape" || button.getAttribute("aria-expanded") !== "true") return;
    show(false);
    button.focus();
  });
}
