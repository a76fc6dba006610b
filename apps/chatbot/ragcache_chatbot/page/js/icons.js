// Icons: drawn once, in the page's sprite.

import { svg } from "./dom.js";

/** @param {string} name of a symbol of index.html, without "icon-" */
export function icon(name) {
  return svg("svg", { class: "icon", "aria-hidden": "true" }, svg("use", { href: `#icon-${name}` }));
}
