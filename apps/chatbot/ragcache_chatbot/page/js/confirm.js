// A question that wants a yes.

import { byId } from "./dom.js";

/**
 * @param {string} title
 * @param {string} text what would happen
 * @param {string} yes words of the button that does it
 * @returns {Promise<boolean>}
 */
export function confirmed(title, text, yes) {
  const dialog = byId("confirm");
  byId("confirm-title").textContent = title;
  byId("confirm-text").textContent = text;
  byId("confirm-yes").textContent = yes;
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true });
  });
}
