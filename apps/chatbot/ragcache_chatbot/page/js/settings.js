// How questions are asked: the form, kept over a reload.

import { byId, element } from "./dom.js";
import { methodName, methodSays, NAMED } from "./method-names.js";

const STORED = "ragcache.settings";
const DEFAULTS = { method: "", k: 5, earlier: true, temperature: "", max_tokens: "", system: "" };
/** A number that is empty is the server's own. */
const NUMBERS = ["k", "temperature", "max_tokens"];

/** @typedef {{name: string, paper: string, summary?: string, needs_training: boolean, usable: boolean}} Method */

export class Settings {
  /** @type {Method[]} */
  #methods = [];
  #own = "";

  constructor() {
    const kept = stored();
    this.#select.append(element("option", { value: kept.method, textContent: kept.method ? methodName(kept.method) : "Recommended" }));
    for (const name of [...NUMBERS, "system"]) byId(name).value = String(kept[/** @type {keyof typeof DEFAULTS} */ (name)]);
    byId("earlier").checked = kept.earlier;
    for (const id of Object.keys(DEFAULTS)) byId(id).addEventListener("change", () => this.#changed());
  }

  /** "" for the store's own. @returns {string} */
  get method() {
    return this.#select.value;
  }

  get system() {
    return byId("system").value.trim();
  }

  /** Names of the methods that can be asked for. */
  get usable() {
    return this.#methods.filter(({ usable }) => usable).map(({ name }) => name);
  }

  /** Passages to read, and how the answer is chosen. */
  get asked() {
    const sampling = Object.fromEntries(
      ["temperature", "max_tokens"].flatMap((name) => (given(name) === null ? [] : [[name, given(name)]])),
    );
    return { k: given("k") ?? DEFAULTS.k, sampling };
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
    const usable = methods.filter((method) => method.usable); // what needs another model is no choice
    const named = NAMED.flatMap((name) => usable.find((method) => method.name === name) ?? []);
    const others = usable.filter((method) => !named.includes(method));
    const own_name = methodName(own) === own ? "" : ` (${methodName(own)})`;
    this.#select.replaceChildren(
      element("option", { value: "", textContent: `Recommended${own_name}` }),
      ...named.map(option),
      ...(others.length ? [element("optgroup", { label: "More methods" }, ...others.map(option))] : []),
    );
    this.#select.value = usable.some(({ name }) => name === chosen) ? chosen : "";
    this.#describe();
  }

  /** @returns {HTMLSelectElement} */
  get #select() {
    return byId("method");
  }

  #changed() {
    for (const name of NUMBERS) noteOn(name);
    const { method, earlier, system } = this;
    const numbers = Object.fromEntries(NUMBERS.map((name) => [name, given(name) ?? DEFAULTS[/** @type {"k"} */ (name)]]));
    localStorage.setItem(STORED, JSON.stringify({ method, earlier, system, ...numbers }));
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
function option({ name }) {
  return element("option", { value: name, textContent: methodName(name) });
}

/** What a method does, as a sentence. @param {Method} method */
function says({ summary = "" }) {
  return summary && `${summary[0].toUpperCase()}${summary.slice(1)}.`;
}

/** The number in a field; null where there is none, or one out of range. @param {string} name */
function given(name) {
  const { validity, value } = byId(name);
  return validity.valid && value !== "" ? Number(value) : null;
}

/** @param {string} name */
function noteOn(name) {
  const { validity, min, max, step } = byId(name);
  const kind = step === "1" ? "a whole number" : "a number";
  byId(`${name}-note`).hidden = validity.valid;
  byId(`${name}-note`).textContent = `Give ${kind} from ${min} to ${max}; until then the default is used.`;
}

/** What was kept, as far as it is of the right kind. @returns {typeof DEFAULTS} */
function stored() {
  try {
    const kept = JSON.parse(localStorage.getItem(STORED) ?? "{}");
    const isRight = (/** @type {string} */ name, /** @type {unknown} */ value) =>
      typeof kept[name] === typeof value || (NUMBERS.includes(name) && typeof kept[name] === "number");
    return Object.assign({}, ...Object.entries(DEFAULTS).map(([name, value]) => ({ [name]: isRight(name, value) ? kept[name] : value })));
  } catch {
    return DEFAULTS;
  }
}
