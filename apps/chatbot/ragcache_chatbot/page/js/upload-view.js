// Adding documents: files, a folder, or what is dropped; progress, and what came of it.

import { ConnectionError } from "./api.js";
import { byId, element } from "./dom.js";
import { bytes, count, counted } from "./format.js";
import { troubleBox } from "./trouble.js";

/** What a stage of an ingestion does. */
const STAGES = { read: "Reading", embed: "Embedding", encode: "Computing KV", commit: "Storing" };
const PART_BYTES = 1024; // what a form holds beside a file, at most

/** What the server takes at once. @typedef {{max_upload_bytes: number, max_upload_files: number}} Limits */

export class UploadView {
  /** @type {AbortController | null} */
  #running = null;

  /**
   * @param {import("./documents.js").Documents} documents
   * @param {{limits: () => Limits | null, changed: (ids: string[]) => void}} page
   *   limits: null while they are not known; changed: the store may hold other documents now, these among them
   */
  constructor(documents, page) {
    this.documents = documents;
    this.page = page;
    for (const picker of [byId("files"), byId("folder")]) {
      picker.addEventListener("change", () => {
        void this.#add([...picker.files]);
        picker.value = "";
      });
    }
    byId("upload-cancel").addEventListener("click", () => this.#running?.abort());
    acceptDrops(byId("documents"), (files) => void this.#add(files));
  }

  /** @param {File[]} files */
  async #add(files) {
    if (!files.length) return;
    if (this.#running) return say("Wait for the upload that is running.");
    const limits = this.page.limits();
    const excess = limits && tooMuch(files, limits);
    if (excess) return byId("documents-news").replaceChildren(element("p", { class: "trouble", role: "alert" }, excess));
    this.#running = new AbortController();
    const { signal } = this.#running;
    byId("documents-news").replaceChildren();
    showSent(files, 0);
    try {
      const report = await this.documents.add(files, (share) => showSent(files, share), showProgress, signal);
      byId("documents-news").replaceChildren(...reportView(report));
      this.page.changed([...report.added, ...report.updated]);
    } catch (error) {
      if (signal.aborted) say("Cancelled. What was stored before stays.");
      else byId("documents-news").replaceChildren(troubleBox(error, () => void this.#add(files)));
      if (!(error instanceof ConnectionError)) this.page.changed([]); // what was stored before
    }
    this.#running = null;
    byId("upload").hidden = true;
  }
}

/** Why these files cannot be sent, and what can; "" where they can. @param {File[]} files @param {Limits} limits */
function tooMuch(files, { max_upload_bytes, max_upload_files }) {
  if (files.length > max_upload_files)
    return `These are ${counted(files.length, "file")}; the server takes ${count(max_upload_files)} at once. Add fewer.`;
  const most = max_upload_bytes - PART_BYTES * files.length;
  const large = files.filter(({ size }) => size > most);
  if (large.length) {
    const names = large.map(({ name, size }) => `${name} (${bytes(size)})`).join(", ");
    return `Too large for this server, which takes ${bytes(max_upload_bytes)} at once: ${names}. Split what is in there, or leave it out.`;
  }
  const all = files.reduce((sum, { size }) => sum + size, 0);
  return all > most ? `These files have ${bytes(all)} together; the server takes ${bytes(max_upload_bytes)} at once. Add fewer.` : "";
}

/** @param {File[]} files @param {number} share */
function showSent(files, share) {
  const all = files.reduce((sum, { size }) => sum + size, 0);
  show(`Sending ${counted(files.length, "file")}, ${bytes(all)}`, share);
}

/** @param {import("./documents.js").Progress} progress */
function showProgress({ stage, done, total, item }) {
  const name = STAGES[/** @type {keyof typeof STAGES} */ (stage)] ?? stage;
  show(`${name}${item ? ` ${item}` : ""}`, total ? done / total : null);
}

/** @param {string} text @param {number | null} share null while there is nothing to measure */
function show(text, share) {
  byId("upload").hidden = false;
  byId("upload-text").textContent = text;
  if (share === null) byId("upload-bar").removeAttribute("value");
  else byId("upload-bar").value = share;
}

/** @param {string} text */
function say(text) {
  byId("documents-news").replaceChildren(element("p", { class: "note" }, text));
}

/** @param {import("./documents.js").Report} report */
function reportView({ added, updated, unchanged, failed }) {
  const parts = [
    added.length && `${counted(added.length, "document")} added`,
    updated.length && `${counted(updated.length, "document")} replaced`,
    unchanged.length && `${counted(unchanged.length, "document")} here already`,
  ];
  const text = parts.filter(Boolean).join(", ");
  const failures = failed.map(({ source, error }) => element("li", {}, element("strong", {}, source), ` ${reason(source, error)}`));
  return [
    ...(text ? [element("p", { class: "good" }, `${text}.`)] : []),
    ...(failures.length ? [element("ul", { class: "trouble" }, ...failures)] : []),
  ];
}

/** Errors often name their source first. @param {string} source @param {string} error */
const reason = (source, error) => (error.startsWith(`${source}: `) ? error.slice(source.length + 2) : error);

/** @param {HTMLElement} place @param {(files: File[]) => void} take */
function acceptDrops(place, take) {
  let depth = 0; // entering a child comes before leaving its parent
  const mark = (/** @type {number} */ change) => {
    depth = change ? depth + change : 0;
    place.classList.toggle("dropping", depth > 0);
  };
  place.addEventListener("dragenter", () => mark(1));
  place.addEventListener("dragleave", () => mark(-1));
  place.addEventListener("dragover", (event) => event.preventDefault());
  place.addEventListener("drop", (event) => {
    event.preventDefault();
    mark(0);
    take([...(event.dataTransfer?.files ?? [])]);
  });
  // A file that misses the place would be opened instead of this page.
  for (const name of ["dragover", "drop"]) addEventListener(name, (event) => event.preventDefault());
}
