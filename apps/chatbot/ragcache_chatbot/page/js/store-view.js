// Figures of the store.

import { byId, element } from "./dom.js";
import { bytes, count } from "./format.js";

/**
 * @typedef {{model: string, method: string, embedder: string, documents: number, chunks: number, tokens: number,
 *   bytes_by_tier: Record<string, number>, hits_by_tier: Record<string, number>, misses: number,
 *   max_positions: number | null, max_upload_bytes: number, max_upload_files: number, file_kinds: string[]}} StoreFigures
 */

export class StoreView {
  /** The last ones. @type {StoreFigures | null} */
  figures = null;

  /** @param {import("./api.js").Api} api */
  constructor(api) {
    this.api = api;
  }

  /** @returns {Promise<StoreFigures>} Raises ApiError, ConnectionError. */
  async refresh() {
    /** @type {StoreFigures} */
    const figures = await this.api.json("v1/store");
    this.figures = figures;
    byId("store").replaceChildren(...rows(figures).flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, value)]));
    return figures;
  }
}

/** @param {StoreFigures} figures @returns {[string, string][]} */
function rows(figures) {
  const byTier = (/** @type {string} */ what, /** @type {Record<string, number>} */ values, /** @type {(n: number) => string} */ say) =>
    Object.entries(values).map(([tier, value]) => /** @type {[string, string]} */ ([`${what} ${tier}`, say(value)]));
  return [
    ["Model", figures.model],
    ["Embedder", figures.embedder],
    ["Documents", count(figures.documents)],
    ["Passages", count(figures.chunks)],
    ["Tokens", count(figures.tokens)],
    ...byTier("KV in", figures.bytes_by_tier, bytes),
    ...byTier("Read from", figures.hits_by_tier, count),
    ["Found in no tier", count(figures.misses)],
    ...(figures.max_positions ? [/** @type {[string, string]} */ (["Context", `${count(figures.max_positions)} tokens`])] : []),
  ];
}
