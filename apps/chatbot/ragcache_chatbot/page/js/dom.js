// Building elements. Text only ever becomes a text node, so nothing that a document or a model says is read as markup.

const SVG = "http://www.w3.org/2000/svg";

/** @typedef {Node | string | null | undefined | false} Child */

/**
 * @param {string} tag
 * @param {Record<string, unknown>} [settings] properties (`hidden`, `onclick`, ...); names with a dash, `class`, `role`
 *   and `for` are set as attributes
 * @param {...Child} children strings become text nodes, what is empty is left out
 * @returns {any} the element
 */
export function element(tag, settings = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(settings)) {
    if (name.includes("-") || ["class", "role", "for"].includes(name)) made.setAttribute(name, String(value));
    else Reflect.set(made, name, value);
  }
  made.append(...children.filter(isThere));
  return made;
}

/**
 * @param {string} tag
 * @param {Record<string, string | number>} [attributes]
 * @param {...SVGElement} children
 * @returns {SVGElement}
 */
export function svg(tag, attributes = {}, ...children) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, String(value));
  made.append(...children);
  return made;
}

/**
 * The element of the page with this id.
 * @param {string} id
 * @returns {any}
 */
export function byId(id) {
  const found = document.getElementById(id);
  if (!found) throw new Error(`the page has no element ${id}`);
  return found;
}

/** @param {Child} child @returns {child is Node | string} */
function isThere(child) {
  return child !== null && child !== undefined && child !== false && child !== "";
}
