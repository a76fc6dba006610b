// Markdown as elements, read by markdown-it. Text only ever becomes text nodes, and nothing is loaded: HTML is shown as
// it was written, and a picture is a link.

import MarkdownIt from "../vendor/markdown-it.js";
import { element } from "./dom.js";

/** @typedef {any} Token of markdown-it */

const reader = new MarkdownIt({ linkify: true }).disable("entity");
reader.linkify.set({ fuzzyLink: false, fuzzyEmail: false });

// A single star between letters or digits is no emphasis: 2*3*4.
const { prototype } = reader.inline.State;
const scanned = prototype.scanDelims;
prototype.scanDelims = function (/** @type {number} */ start, /** @type {boolean} */ canSplitWord) {
  const splits = /^\w\*\w$/.test(this.src.slice(Math.max(0, start - 1), start + 2));
  return scanned.call(this, start, canSplitWord && !splits);
};

/**
 * The blocks of a text, each with its source. They are made into elements where they are shown.
 * @param {string} text
 * @returns {{source: string, show: () => HTMLElement[]}[]}
 */
export function blocks(text) {
  const lines = text.split("\n");
  /** @type {Token[][]} */
  const found = [];
  let open = 0;
  for (const token of reader.parse(text, {})) {
    if (open === 0) found.push([]);
    found[found.length - 1].push(token);
    open += token.nesting;
  }
  return found.map((tokens) => ({ source: lines.slice(...tokens[0].map).join("\n"), show: () => tree(tokens) }));
}

/** @param {string} text @returns {HTMLElement[]} */
export const markdown = (text) => blocks(text).flatMap(({ show }) => show());

/** @param {Token[]} tokens @returns {any[]} the elements that they stand for */
function tree(tokens) {
  /** @type {{token: Token | null, children: (Node | string)[]}[]} */
  const open = [{ token: null, children: [] }];
  for (const token of tokens) {
    if (token.nesting > 0) open.push({ token, children: [] });
    else {
      const ended = token.nesting < 0 ? open.pop() : null;
      const made = ended ? [container(ended.token, ended.children)] : leaf(token);
      open[open.length - 1].children.push(...made);
    }
  }
  return open[0].children;
}

/** @param {Token} token @param {(Node | string)[]} children */
function container(token, children) {
  const { tag } = token;
  if (tag === "a") return link(token.attrGet("href"), children);
  // Below the question, which is the turn's heading. One level for all: a model's own levels begin anywhere.
  if (/^h\d/.test(tag)) return element("h4", { "data-level": tag[1] }, ...children);
  if (tag === "table") return element("div", { class: "wide", tabIndex: 0, role: "group", "aria-label": "Table" }, element("table", {}, ...children));
  const align = /right|center/.exec(token.attrGet("style") ?? "")?.[0] ?? "start";
  const settings = /^t[hd]$/.test(tag) ? { "data-align": align.replace("right", "end") } : token.attrGet("start") ? { start: token.attrGet("start") } : {};
  return element(tag === "s" ? "del" : tag, settings, ...children);
}

/** @param {Token} token @returns {(Node | string)[]} */
function leaf(token) {
  if (token.type === "inline") return tree(token.children);
  if (token.type === "image") return [link(token.attrGet("src"), [token.content])];
  if (token.type === "fence" || token.type === "code_block") return [code(token.content.replace(/\n$/, ""), token.info.trim().split(/\s/)[0])];
  if (token.type === "softbreak") return ["\n"];
  return [token.tag ? element(token.tag, {}, token.content) : token.content];
}

/** @param {string} text @param {string} language */
function code(text, language) {
  const shown = element("pre", { tabIndex: 0, role: "group", "aria-label": language ? `Code, ${language}` : "Code" }, element("code", {}, text));
  return element("div", { class: "code" }, shown);
}

/** A link to another page; anything else is its words. @param {string} address @param {(Node | string)[]} words */
function link(address, words) {
  if (!/^https?:\/\//i.test(address)) return element("span", {}, ...words);
  return element("a", { href: address, target: "_blank", rel: "noopener noreferrer" }, ...(words.join("") ? words : [address]));
}
