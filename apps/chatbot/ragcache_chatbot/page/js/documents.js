// The server's documents: list, add, delete.

import { ApiError, ConnectionError } from "./api.js";

/**
 * @typedef {{id: string, title: string, source: string, chunks: number, tokens: number, state: string}} Document
 */

/**
 * What an upload came to.
 * @typedef {{added: string[], updated: string[], unchanged: string[], failed: {source: string, error: string, type?: string}[]}} Report
 */

/** @typedef {{stage: string, done: number, total: number, item: string}} Progress */

export class Documents {
  /** @param {import("./api.js").Api} api */
  constructor(api) {
    this.api = api;
  }

  /**
   * @param {number} offset
   * @param {number} limit
   * @param {string} name part of an id; "" for all
   * @returns {Promise<{data: Document[], total: number}>}
   */
  list(offset, limit, name) {
    const query = new URLSearchParams({ limit: String(limit), offset: String(offset), ...(name ? { id: `*${name}*` } : {}) });
    return this.api.json(`v1/documents?${query}`);
  }

  /** @param {string} id @returns {Promise<Document>} */
  get(id) {
    return this.api.json(path(id));
  }

  /** @param {string} id */
  delete(id) {
    return this.api.json(path(id), { method: "DELETE" });
  }

  /**
   * @param {Iterable<File>} files those of a folder are named with their path in it
   * @param {boolean} replace documents of the same names
   * @param {(share: number) => void} onSent how much has been sent, of 1
   * @param {(progress: Progress) => void} onProgress of what follows
   * @param {AbortSignal} signal
   * @returns {Promise<Report>}
   */
  async add(files, replace, onSent, onProgress, signal) {
    const form = new FormData();
    for (const file of files) form.append("files", file, nameOf(file));
    for await (const { event, data } of this.api.events(`v1/documents?replace=${replace}`, form, signal, onSent)) {
      const said = JSON.parse(data);
      if (event === "progress") onProgress(said);
      else if (event === "done") return said;
      else if (event === "error") throw new ApiError(0, said.error ?? said);
    }
    throw new ConnectionError("The connection broke before the upload was complete.");
  }
}

/** @param {File} file */
export const nameOf = (file) => file.webkitRelativePath || file.name;

/** @param {string} id */
const path = (id) => `v1/documents/${encodeURIComponent(id)}`;
