// What stands inside a line of Markdown: code, emphasis, links.

import { element } from "./dom.js";

const LONGEST = 20_000; // characters that are searched for marks; a longer run of text stays as it is
const DEEPEST = 6;

/**
 * The marks, the first that matches where none began earlier. None of them can match in more than one way.
 * @type {[RegExp, (found: RegExpExecArray, depth: number) => Node][]}
 */
const MARKS = [
  [/\\([\\`*_{}[\]()#+\-.!|>~])/g, (found) => document.createTextNode(found[1])],
  [/(`+)([^`]+)\1(?!`)/g, (found) => element("code", {}, found[2].trim())],
  [/!?\[([^\[\]\n]{0,500})\]\(\s*<?([^\s()<>]{1,2000})>?(?:\s+"[^"\n]{0,500}")?\s*\)/g, (found) => link(found[2], found[1])],
  [/https?:\/\/[^\s<>()[\]"'`]{1,2000}[^\s<>()[\]"'`.,;:!?*_]/g, (found) => link(found[0], found[0])],
  [/\*\*(?=\S)([^*\n]{1,2000}|[^\n]{1,2000}?)(?<=\S)\*\*/g, (found, depth) => element("strong", {}, ...spans(found[1], depth + 1))],
  [/(?<![\w_])__(?=\S)([^_\n]{1,2000})(?<=\S)__(?![\w_])/g, (found, depth) => element("strong", {}, ...spans(found[1], depth + 1))],
  [/(?<![\w*])\*(?=[^\s*])([^*\n]{1,2000})(?<=\S)\*(?![\w*])/g, (found, depth) => element("em", {}, ...spans(found[1], depth + 1))],
  [/(?<![\w_])_(?=[^\s_])([^_\n]{1,2000})(?<=\S)_(?![\w_])/g, (found, depth) => element("em", {}, ...spans(found[1], depth + 1))],
  [/~~(?=\S)([^~\n]{1,2000})(?<=\S)~~/g, (found, depth) => element("del", {}, ...spans(found[1], depth + 1))],
];

/**
 * @param {string} text
 * @param {number} [depth]
 * @returns {(Node | string)[]}
 */
export function spans(text, depth = 0) {
  if (depth > DEEPEST || text.length > LONGEST) return [text];
  /** @type {(Node | string)[]} */
  const made = [];
  const next = MARKS.map(([mark]) => first(mark, text, 0));
  for (let at = 0; at < text.length; ) {
    MARKS.forEach(([mark], i) => {
      const found = next[i];
      if (found && found.index < at) next[i] = first(mark, text, at);
    });
    const starts = next.map((found) => found?.index ?? Infinity);
    const start = Math.min(...starts);
    made.push(text.slice(at, start));
    if (start === Infinity) break;
    const rank = starts.indexOf(start);
    const found = /** @type {RegExpExecArray} */ (next[rank]);
    made.push(MARKS[rank][1](found, depth));
    at = start + found[0].length;
  }
  return made.filter((part) => part !== "");
}

/** @param {RegExp} mark @param {string} text @param {number} from */
function first(mark, text, from) {
  mark.lastIndex = from;
  return mark.exec(text);
}

/** A link to another page; anything else, pictures included, is its words. @param {string} address @param {string} words */
function link(address, words) {
  if (!/^https?:\/\//i.test(address)) return document.createTextNode(words || address);
  return element("a", { href: address, target: "_blank", rel: "noopener noreferrer" }, words || address);
}
