// Method, number of passages, earlier turns: the form, kept over a reload.

import { byId, element } from "./dom.js";
import { methodName, methodSays, NAMED } from "./method-names.js";

const STORED = "ragcache.settings";
const DEFAULTS = { method: "", k: 5, earlier: true };

/** @typedef {{name: string, paper: string, summary?: string, needs_training: boolean, usable: boolean}} Method */

export class Settings {
  /** @type {Method[]} */
  #methods = [];
  #own = "";

  constructor() {
    const kept = stored();
    this.#select.append(element("option", { value: kept.method, textContent: kept.method ? methodName(kept.method) : "Recommended" }));
    byId("k").value = String(kept.k);
    byId("earlier").checked = kept.earlier;
    for (const id of ["method", "k", "earlier"]) byId(id).addEventListener("change", () => this.#changed());
  }

  /** "" for the store's own. @returns {string} */
  get method() {
    return this.#select.value;
  }

  get k() {
    const k = byId("k");
    return k.validity.valid && k.value ? Number(k.value) : DEFAULTS.k;
  }

  get earlier() {
    return byId("earlier").checked;
  }

  /**
   * @param {Method[]} methods
   * @param {string} own the store's own
   */
  offer(methods, own) {
    const chosen = this.method;
    this.#methods = methods;
    this.#own = own;
    const named = NAMED.flatMap((name) => methods.find((method) => method.name === name) ?? []);
    const others = methods.filter((method) => !named.includes(method));
    const own_name = methodName(own) === own ? "" : ` (${methodName(own)})`;
    this.#select.replaceChildren(
      element("option", { value: "", textContent: `Recommended${own_name}` }),
      ...named.map(option),
      element("optgroup", { label: "More methods" }, ...others.map(option)),
    );
    this.#select.value = methods.some(({ name, usable }) => usable && name === chosen) ? chosen : "";
    this.#describe();
  }

  /** @returns {HTMLSelectElement} */
  get #select() {
    return byId("method");
  }

  #changed() {
    const k = byId("k");
    byId("k-note").hidden = k.validity.valid && k.value !== "";
    byId("k-note").textContent = `Give a whole number from ${k.min} to ${k.max}; until then ${DEFAULTS.k} are read.`;
    localStorage.setItem(STORED, JSON.stringify({ method: this.method, k: this.k, earlier: this.earlier }));
    this.#describe();
  }

  #describe() {
    const method = this.#methods.find(({ name }) => name === (this.method || this.#own));
    byId("method-note").textContent = method ? methodSays(method.name) || says(method) : "";
    byId("method-more").hidden = !method;
    byId("method-paper").textContent = method ? [`${method.name}: ${method.summary}`, method.paper].filter(Boolean).join(". ") : "";
  }
}

/** @param {Method} method */
function option({ name, usable }) {
  const shown = methodName(name);
  return element("option", { value: name, disabled: !usable, textContent: usable ? shown : `${shown} (needs a trained model)` });
}

/** What a method does, as a sentence. @param {Method} method */
function says({ summary = "" }) {
  return summary && `${summary[0].toUpperCase()}${summary.slice(1)}.`;
}

/** What was kept, as far as it makes sense. */
function stored() {
  try {
    const { method, k, earlier } = JSON.parse(localStorage.getItem(STORED) ?? "{}");
    return {
      method: typeof method === "string" ? method : DEFAULTS.method,
      k: Number.isInteger(k) && k > 0 && k <= 50 ? k : DEFAULTS.k,
      earlier: typeof earlier === "boolean" ? earlier : DEFAULTS.earlier,
    };
  } catch {
    return DEFAULTS;
  }
}
