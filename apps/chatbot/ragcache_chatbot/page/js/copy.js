// Copying text. Where the page is not served from this machine or over HTTPS, browsers leave only the older way.

import { announce } from "./announcer.js";
import { element } from "./dom.js";
import { icon } from "./icons.js";

const SHOWN_MS = 1500;

/** @param {string} name what is copied @param {() => string} text @returns {HTMLButtonElement} */
export function copyButton(name, text) {
  const button = element("button", { type: "button", class: "bare", "aria-label": `Copy ${name}`, title: `Copy ${name}` }, icon("copy"));
  button.addEventListener("click", async () => {
    const done = await copied(text());
    announce(done ? "Copied" : "The browser does not let this page copy.");
    if (!done) return;
    button.replaceChildren(icon("done"));
    setTimeout(() => button.replaceChildren(icon("copy")), SHOWN_MS);
  });
  return button;
}

/** @param {string} text @returns {Promise<boolean>} */
async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copiedBySelection(text); // no permission, or no secure context
  }
}

/** @param {string} text */
function copiedBySelection(text) {
  const held = document.activeElement;
  const box = element("textarea", { class: "for-readers", value: text, "aria-hidden": "true" });
  document.body.append(box);
  box.select();
  const done = document.execCommand("copy");
  box.remove();
  if (held instanceof HTMLElement) held.focus();
  return done;
}
