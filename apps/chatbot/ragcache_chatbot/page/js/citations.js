// Which passages the sentences of an answer stand in. The model names none: it is not told their numbers, so that their
// KV serves at every rank. A sentence is cited with the passages that hold its words, rare words counting most.

import { element } from "./dom.js";

// Scripts without spaces between words, of which two letters next to each other stand for a word.
const UNSPACED = /[\p{Script=Han}\p{Script=Hiragana}\p{Script=Katakana}\p{Script=Thai}\p{Script=Lao}\p{Script=Khmer}\p{Script=Myanmar}ー]+/gu;
const MOST = 3; // passages for one sentence
const LEAST_GAIN = 0.125; // of the sentence's weight, that a passage has to add
const LEAST_COVER = 0.5; // of it, that all of them have to hold

/**
 * Put a button behind each sentence of an answer for each passage that holds it.
 * @param {HTMLElement} answer
 * @param {string[]} names of the passages, as they are shown
 * @param {string[]} texts of the passages, their documents' titles among them
 * @param {(passage: number) => void} open
 */
export function cite(answer, names, texts, open) {
  const passages = texts.map(words);
  for (const place of answer.querySelectorAll("p, td")) {
    for (const { end, sentence } of sentences(place.textContent ?? "").reverse()) {
      const buttons = holding(sentence, passages).map((passage) => citation(passage, names[passage], open));
      if (buttons.length) insert(place, end, element("span", { class: "cites" }, ...buttons));
    }
  }
}

/**
 * @param {string} sentence
 * @param {Set<string>[]} passages the words of each
 * @returns {number[]} the fewest passages that hold the sentence; none where they do not hold half of it
 */
export function holding(sentence, passages) {
  const open = new Map([...words(sentence)].map((word) => [word, weight(word, passages)]));
  const all = sum(open.values());
  let left = all;
  const chosen = [];
  while (chosen.length < MOST && left > 0) {
    const gains = passages.map((held) => sum([...open].map(([word, value]) => (held.has(word) ? value : 0))));
    const gain = Math.max(0, ...gains);
    if (gain <= 0 || gain < LEAST_GAIN * all) break;
    const best = gains.indexOf(gain);
    for (const word of passages[best]) open.delete(word);
    chosen.push(best);
    left -= gain;
  }
  return all > 0 && all - left >= LEAST_COVER * all ? chosen.sort((a, b) => a - b) : [];
}

/** @param {string} text */
export const words = (text) => {
  const lower = text.toLowerCase();
  const runs = (lower.match(UNSPACED) ?? []).map((run) => [...run]);
  const pairs = runs.flatMap((run) => run.map((letter, at) => letter + (run[at + 1] ?? "")).slice(0, Math.max(run.length - 1, 1)));
  return new Set([...(lower.replace(UNSPACED, " ").match(/[\p{L}\p{N}]{3,}|\p{N}+/gu) ?? []), ...pairs]);
};

/** A word that stands in every passage says little about where a sentence is from. @param {string} word @param {Set<string>[]} passages */
function weight(word, passages) {
  const holders = passages.filter((held) => held.has(word)).length;
  return Math.log(1 + passages.length / Math.max(holders, 1));
}

/** @param {Iterable<number>} values */
const sum = (values) => [...values].reduce((total, value) => total + value, 0);

/** @param {string} text @returns {{sentence: string, end: number}[]} end: behind its last character that is no space */
function sentences(text) {
  const found = [...new Intl.Segmenter("en", { granularity: "sentence" }).segment(text)];
  return found.map(({ segment, index }) => ({ sentence: segment, end: index + segment.trimEnd().length }));
}

/** @param {number} passage @param {string} name @param {(passage: number) => void} open */
function citation(passage, name, open) {
  const settings = { type: "button", class: "cite", "data-number": passage + 1, title: name, "aria-label": `Source ${passage + 1}: ${name}` };
  return element("button", { ...settings, onclick: () => open(passage) });
}

/** @param {Element} place @param {number} offset in its text @param {Node} node */
function insert(place, offset, node) {
  const walker = document.createTreeWalker(place, NodeFilter.SHOW_TEXT);
  let before = 0;
  for (let text = /** @type {Text | null} */ (walker.nextNode()); text; text = /** @type {Text | null} */ (walker.nextNode())) {
    if (before + text.data.length >= offset) {
      const link = text.parentElement?.closest("a, code"); // a button cannot stand inside of a link
      if (link && place.contains(link)) link.after(node);
      else text.splitText(offset - before).before(node);
      return;
    }
    before += text.data.length;
  }
}
