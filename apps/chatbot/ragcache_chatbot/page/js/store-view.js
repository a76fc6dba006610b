// Figures of the store.

import { byId, element } from "./dom.js";
import { explain } from "./errors.js";
import { bytes, count } from "./format.js";

/**
 * @typedef {{model: string, method: string, embedder: string, documents: number, chunks: number, tokens: number,
 *   bytes_by_tier: Record<string, number>, hits_by_tier: Record<string, number>, misses: number,
 *   max_positions: number | null}} StoreFigures
 */

export class StoreView {
  /** @param {import("./api.js").Api} api */
  constructor(api) {
    this.api = api;
  }

  /** @returns {Promise<StoreFigures | null>} null, and the reason shown, where they cannot be had */
  async refresh() {
    try {
      /** @type {StoreFigures} */
      const figures = await this.api.json("v1/store");
      byId("store").replaceChildren(...rows(figures).flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, value)]));
      byId("store-news").replaceChildren();
      return figures;
    } catch (error) {
      byId("store-news").replaceChildren(troubleBox(error, () => this.refresh()));
      return null;
    }
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

/**
 * An error in its place, with what to do.
 * @param {unknown} error
 * @param {(() => void) | null} retry
 */
export function troubleBox(error, retry) {
  const { message, advice } = explain(error);
  const again = retry && element("button", { type: "button", class: "small", onclick: retry }, "Try again");
  return element("div", { class: "trouble", role: "alert" }, element("strong", {}, message), element("span", {}, advice), again);
}
