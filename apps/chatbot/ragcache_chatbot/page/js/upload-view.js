// Adding documents: files, a folder, or what is dropped; progress, and what came of it.

import { ConnectionError } from "./api.js";
import { nameOf } from "./documents.js";
import { byId, element } from "./dom.js";
import { bytes, counted } from "./format.js";
import { troubleBox } from "./trouble.js";

/** What a stage of an ingestion does. */
const STAGES = { read: "Reading", embed: "Embedding", encode: "Computing KV", commit: "Storing" };
const PART_BYTES = 1024; // what a form holds beside a file, at most

/**
 * What the server takes at once, and the endings of the files that it can read.
 * @typedef {{max_upload_bytes: number, max_upload_files: number, file_kinds: string[]}} Limits
 */

export class UploadView {
  /** Before the server has told its own, it refuses what is too much. @type {Limits} */
  #limits = { max_upload_bytes: Infinity, max_upload_files: Infinity, file_kinds: [] };
  /** @type {AbortController | null} */
  #running = null;

  /**
   * @param {import("./documents.js").Documents} documents
   * @param {(ids: string[]) => void} changed the store may hold other documents now, these among them
   */
  constructor(documents, changed) {
    this.documents = documents;
    this.changed = changed;
    onPicked(byId("files"), (files) => void this.#add(files));
    onPicked(byId("folder"), (files) => void this.#add(files.filter((file) => this.#isReadable(file))));
    byId("upload-cancel").addEventListener("click", () => this.#running?.abort());
    acceptDrops(byId("documents"), (files) => void this.#add(files));
  }

  /** @param {Limits} limits */
  allow(limits) {
    this.#limits = limits;
    byId("files").accept = limits.file_kinds.join(",");
  }

  /** Whether a file of a folder is sent: most folders hold others too. @param {File} file */
  #isReadable({ name }) {
    const { file_kinds } = this.#limits;
    return !file_kinds.length || file_kinds.some((kind) => name.toLowerCase().endsWith(kind));
  }

  /** @param {File[]} files @param {boolean} replace documents of the same names */
  async #add(files, replace = false) {
    if (this.#running) return say("Wait for the upload that is running.");
    if (!files.length) return say("There is no file that can be read.");
    this.#running = new AbortController();
    const { signal } = this.#running;
    byId("documents-news").replaceChildren();
    try {
      const report = await this.#send(files, replace, signal);
      byId("documents-news").replaceChildren(...reportView(report), ...this.#replaceButton(files, report));
      this.changed([...report.added, ...report.updated]);
    } catch (error) {
      if (signal.aborted) say("Cancelled. What was stored before stays.");
      else byId("documents-news").replaceChildren(troubleBox(error, () => void this.#add(files, replace)));
      if (!(error instanceof ConnectionError)) this.changed([]); // what was stored before
    }
    this.#running = null;
    byId("upload").hidden = true;
  }

  /** For the files whose names others have. @param {File[]} files @param {import("./documents.js").Report} report */
  #replaceButton(files, { failed }) {
    const there = failed.filter(({ type }) => type === "DocumentExistsError").map(({ source }) => source);
    const again = files.filter((file) => there.some((source) => source === nameOf(file) || source.startsWith(`${nameOf(file)}:`)));
    const onclick = () => void this.#add(again, true);
    return again.length ? [element("button", { type: "button", class: "small", onclick }, `Replace ${counted(again.length, "document")}`)] : [];
  }

  /** @param {File[]} files @param {boolean} replace @param {AbortSignal} signal @returns {Promise<import("./documents.js").Report>} */
  async #send(files, replace, signal) {
    const most = this.#limits.max_upload_bytes;
    const large = files.filter(({ size }) => size + PART_BYTES > most);
    const error = (/** @type {File} */ { size }) => `has ${bytes(size)}; this server takes ${bytes(most)} at once.`;
    /** @type {import("./documents.js").Report} */
    const report = { added: [], updated: [], unchanged: [], failed: large.map((file) => ({ source: file.name, error: error(file) })) };
    for (const batch of batches(files.filter((file) => !large.includes(file)), this.#limits)) {
      showSent(batch, 0);
      const { added, updated, unchanged, failed } = await this.documents.add(batch, replace, (share) => showSent(batch, share), showProgress, signal);
      report.added.push(...added);
      report.updated.push(...updated);
      report.unchanged.push(...unchanged);
      report.failed.push(...failed);
    }
    return report;
  }
}

/** @param {HTMLInputElement} picker @param {(files: File[]) => void} take */
function onPicked(picker, take) {
  picker.addEventListener("change", () => {
    const files = [...(picker.files ?? [])];
    picker.value = ""; // so that the same can be chosen again
    if (files.length) take(files);
  });
}

/** As many requests as the server's limits want. @param {File[]} files none larger than the server takes @param {Limits} limits */
function batches(files, { max_upload_bytes, max_upload_files }) {
  /** @type {File[][]} */
  const made = [];
  let room = 0;
  for (const file of files) {
    const size = file.size + PART_BYTES;
    if (size > room || made[made.length - 1].length >= max_upload_files) {
      made.push([]);
      room = max_upload_bytes;
    }
    made[made.length - 1].push(file);
    room -= size;
  }
  return made;
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
