// The passages that an answer was read from.

import { element } from "./dom.js";
import { counted } from "./format.js";

/** Where keys and values came from: how it is said, and why. Another word of the server is shown as it is. */
const ORIGINS = {
  device: ["on the device", "Its KV was on the model's device already."],
  memory: ["from memory", "Its KV was in host memory."],
  disk: ["from disk", "Its KV was read from the store on disk."],
  remote: ["from afar", "Its KV was read from the store that several machines share."],
  computed: ["computed now", "Its KV was in no tier: the model read the passage for this question. It is kept."],
  exact: ["from an earlier prompt", "An earlier prompt began with the same tokens: their KV was kept as it was."],
  unused: ["KV unused", "The method read the passage's text."],
};

/** @param {string} kv @returns {string[]} */
const origin = (kv) => ORIGINS[/** @type {keyof typeof ORIGINS} */ (kv)] ?? [kv, ""];

/** @param {import("./chat.js").Source[]} sources @returns {string} such as "3 from memory, 1 computed now" */
export function originsText(sources) {
  /** @type {Map<string, number>} */
  const tally = new Map();
  for (const { kv } of sources) tally.set(kv, (tally.get(kv) ?? 0) + 1);
  return [...tally].map(([kv, number]) => `${number} ${origin(kv)[0]}`).join(", ");
}

/** @param {import("./chat.js").Source[]} sources @returns {HTMLElement} */
export function sourcesView(sources) {
  return element("ol", { class: "sources" }, ...sources.map((source) => element("li", {}, passage(source))));
}

/** @param {import("./chat.js").Source} source */
function passage(source) {
  const [words, why] = origin(source.kv);
  const facts = [source.score === null ? "" : `score ${source.score.toFixed(2)}`, counted(source.tokens, "token")];
  return element(
    "details",
    { class: "passage" },
    element(
      "summary",
      {},
      element("span", { class: "passage-name" }, source.title || source.source || source.chunk_id),
      element("span", { class: "passage-facts" }, facts.filter(Boolean).join(", ")),
      element("span", { class: `kv kv-${source.kv in ORIGINS ? source.kv : "other"}` }, words),
    ),
    element("blockquote", {}, source.text),
    element("p", { class: "note" }, [source.source, why].filter(Boolean).join(" · ")),
  );
}
