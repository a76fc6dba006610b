// Adding documents: a file picker, a place to drop files on, progress, and what came of it.

import { byId, element } from "./dom.js";
import { counted } from "./format.js";
import { troubleBox } from "./store-view.js";

/** What a stage of an ingestion does. */
const STAGES = { read: "Reading", embed: "Embedding", encode: "Computing KV", commit: "Storing" };

export class UploadView {
  /** @type {AbortController | null} */
  #running = null;

  /**
   * @param {import("./documents.js").Documents} documents
   * @param {(ids: string[]) => void} changed the store may hold other documents now, these among them
   */
  constructor(documents, changed) {
    this.documents = documents;
    this.changed = changed;
    byId("files").addEventListener("change", () => {
      void this.#add([...byId("files").files]);
      byId("files").value = "";
    });
    byId("upload-cancel").addEventListener("click", () => this.#running?.abort());
    acceptDrops(byId("documents"), (files) => void this.#add(files));
  }

  /** @param {File[]} files */
  async #add(files) {
    if (!files.length) return;
    if (this.#running) return say("Wait for the upload that is running.");
    this.#running = new AbortController();
    byId("documents-news").replaceChildren();
    showProgress(`Sending ${counted(files.length, "file")}`, null);
    try {
      const report = await this.documents.add(files, onProgress, this.#running.signal);
      byId("documents-news").replaceChildren(...reportView(report));
      this.changed([...report.added, ...report.updated]);
    } catch (error) {
      if (this.#running.signal.aborted) say("Cancelled. What was stored before stays.");
      else byId("documents-news").replaceChildren(troubleBox(error, () => void this.#add(files)));
      this.changed([]); // what was stored before
    }
    this.#running = null;
    byId("upload").hidden = true;
  }
}

/** @param {import("./documents.js").Progress} progress */
function onProgress({ stage, done, total, item }) {
  const name = STAGES[/** @type {keyof typeof STAGES} */ (stage)] ?? stage;
  showProgress(`${name}${item ? ` ${item}` : ""}`, total ? done / total : null);
}

/** @param {string} text @param {number | null} share null while there is nothing to measure */
function showProgress(text, share) {
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
