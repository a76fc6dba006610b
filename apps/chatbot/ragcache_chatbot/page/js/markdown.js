// Markdown as elements: headings, lists, tables, code, quotes. Text only ever becomes text nodes, and nothing is loaded:
// what is no Markdown here, HTML included, is shown as it was written.

import { element } from "./dom.js";
import { spans } from "./markdown-spans.js";

// No two neighbouring parts of these take the same characters: no line takes more than time in proportion to its length.
const FENCE = /^ {0,3}(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})\s(.*)$/;
const RULE = /^ {0,3}(?:(?:\*\s*){3,}|(?:-\s*){3,}|(?:_\s*){3,})$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])\s+/;
const DIVIDER = /^\|?\s*:?-+:?\s*(?:\|\s*:?-+:?\s*)*\|?$/;
const DEEPEST = 8; // lists and quotes within each other; what is deeper stays text

/**
 * @param {string} text
 * @param {number} [depth]
 * @returns {HTMLElement[]}
 */
export function markdown(text, depth = 0) {
  return blocks(text).map((lines) => block(lines, depth));
}

/**
 * The lines of each block, blank ones between blocks left out.
 * @param {string} text
 * @returns {string[][]}
 */
export function blocks(text) {
  const lines = text.replace(/\r\n?/g, "\n").replace(/\t/g, "    ").split("\n");
  const found = [];
  for (let at = 0; at < lines.length; ) {
    if (!lines[at].trim()) at++;
    else {
      const end = blockEnd(lines, at);
      found.push(lines.slice(at, end));
      at = end;
    }
  }
  return found;
}

/** @param {string[]} lines @param {number} at */
function blockEnd(lines, at) {
  const fence = FENCE.exec(lines[at]);
  if (fence) return fenceEnd(lines, at, fence[1]);
  if (HEADING.test(lines[at]) || RULE.test(lines[at])) return at + 1;
  if (ITEM.test(lines[at])) return listEnd(lines, at);
  if (QUOTE.test(lines[at])) return runEnd(lines, at, (line) => QUOTE.test(line));
  if (isTable(lines, at)) return runEnd(lines, at, (line) => line.includes("|"));
  let end = at + 1;
  while (end < lines.length && lines[end].trim() && !startsBlock(lines, end)) end++;
  return end;
}

/** @param {string[]} lines @param {number} at @param {string} mark a fence that never ends takes what is left */
function fenceEnd(lines, at, mark) {
  let end = at + 1;
  while (end < lines.length && !(lines[end].trim().startsWith(mark) && !lines[end].trim().slice(mark.length).replaceAll(mark[0], ""))) end++;
  return Math.min(end + 1, lines.length);
}

/** Items, and what is indented below them, blank lines included. @param {string[]} lines @param {number} at */
function listEnd(lines, at) {
  const ordered = isOrdered(lines[at]);
  let end = at + 1;
  for (let next = end; next < lines.length; next++) {
    const line = lines[next];
    if (!line.trim()) continue;
    const goesOn = /^ {2,}/.test(line) || (ITEM.test(line) && isOrdered(line) === ordered && !RULE.test(line));
    const isLazy = next === end && !startsBlock(lines, next);
    if (!goesOn && !isLazy) break;
    end = next + 1;
  }
  return end;
}

/** @param {string} line */
const isOrdered = (line) => /^\s*\d/.test(line);

/** @param {string[]} lines @param {number} at @param {(line: string) => boolean} belongs */
function runEnd(lines, at, belongs) {
  let end = at + 1;
  while (end < lines.length && lines[end].trim() && belongs(lines[end])) end++;
  return end;
}

/** @param {string[]} lines @param {number} at */
const isTable = (lines, at) => lines[at].includes("|") && at + 1 < lines.length && lines[at + 1].includes("-") && DIVIDER.test(lines[at + 1].trim());

/** @param {string[]} lines @param {number} at */
const startsBlock = (lines, at) =>
  [FENCE, HEADING, RULE, QUOTE, ITEM].some((start) => start.test(lines[at])) || isTable(lines, at);

/** @param {string[]} lines of one block @param {number} depth @returns {HTMLElement} */
function block(lines, depth) {
  const fence = FENCE.exec(lines[0]);
  if (fence) return code(lines, fence[1], fence[2].trim().split(/\s/)[0]);
  const heading = HEADING.exec(lines[0]);
  // Below the question, which is the turn's heading. One level for all: a model's own levels begin anywhere.
  if (heading) return element("h4", { "data-level": heading[1].length }, ...spans(heading[2].trim().replace(/ #+$/, "")));
  if (RULE.test(lines[0])) return element("hr");
  if (depth < DEEPEST && ITEM.test(lines[0])) return list(lines, depth);
  if (depth < DEEPEST && QUOTE.test(lines[0]))
    return element("blockquote", {}, ...markdown(lines.map((line) => line.replace(QUOTE, "")).join("\n"), depth + 1));
  if (isTable(lines, 0)) return table(lines);
  return element("p", {}, ...spans(lines.join("\n")));
}

/** @param {string[]} lines @param {string} mark @param {string} language */
function code(lines, mark, language) {
  const closed = lines.length > 1 && lines[lines.length - 1].trim().startsWith(mark);
  const text = lines.slice(1, closed ? -1 : undefined).join("\n");
  const shown = element("pre", { tabIndex: 0, role: "group", "aria-label": language ? `Code, ${language}` : "Code" }, element("code", {}, text));
  return element("div", { class: "code" }, shown);
}

/** @param {string[]} lines @param {number} depth */
function list(lines, depth) {
  const made = element(isOrdered(lines[0]) ? "ol" : "ul");
  if (isOrdered(lines[0])) made.start = Number.parseInt(lines[0].trim(), 10);
  made.append(...items(lines).map((item) => element("li", {}, ...markdown(item, depth + 1))));
  return made;
}

/** The text of each item, without its mark and its indent. @param {string[]} lines @returns {string[]} */
function items(lines) {
  const indent = /** @type {RegExpExecArray} */ (ITEM.exec(lines[0]))[1].length;
  /** @type {string[][]} */
  const found = [];
  let width = 0;
  for (const line of lines) {
    const mark = ITEM.exec(line);
    if (mark && mark[1].length <= indent + 1) {
      width = mark[0].length;
      found.push([line.slice(width)]);
    } else {
      const blank = line.length - line.trimStart().length;
      found[found.length - 1].push(line.slice(Math.min(blank, width)));
    }
  }
  return found.map((item) => item.join("\n"));
}

/** @param {string[]} lines */
function table([head, divider, ...rows]) {
  const aligned = cells(divider).map((cell) => (cell.endsWith(":") ? (cell.startsWith(":") ? "center" : "end") : "start"));
  const row = (/** @type {string} */ line, /** @type {string} */ tag) => {
    const filled = [...cells(line), ...aligned.map(() => "")].slice(0, aligned.length);
    return element("tr", {}, ...filled.map((cell, i) => element(tag, { "data-align": aligned[i] }, ...spans(cell))));
  };
  const body = element("tbody", {}, ...rows.map((line) => row(line, "td")));
  const made = element("table", {}, element("thead", {}, row(head, "th")), body);
  return element("div", { class: "wide", tabIndex: 0, role: "group", "aria-label": "Table" }, made);
}

/** @param {string} line */
function cells(line) {
  const inner = line.trim().replace(/^\|/, "").replace(/(?<!\\)\|$/, "");
  return inner.split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}
