// What the bundled model can be asked: it knows one kind of text.

import { byId, element } from "./dom.js";

const BUNDLED = /^mini(-|_|$)/;
const EXAMPLES = [
  "What is Victor Branovic's profession?",
  "Which product is Mount Birchcombe known for?",
  "What does the home town of Julia Haleau make?",
];

/**
 * @param {import("./store-view.js").StoreFigures} figures
 * @param {(question: string) => void} ask
 */
export function showHints({ model, documents }, ask) {
  const parts = [];
  if (!documents) parts.push(element("p", {}, "The store is empty. Add documents first."));
  if (BUNDLED.test(model)) {
    const says = "This is the bundled mini model: it answers questions about a made-up registry, and is no general chatter.";
    const examples = EXAMPLES.map((question) => {
      const onclick = () => ask(question);
      return element("li", {}, element("button", { type: "button", class: "example", onclick }, question));
    });
    parts.push(element("p", { class: "note" }, says), element("ul", { class: "examples" }, ...examples));
  }
  byId("hints").replaceChildren(...parts);
}
