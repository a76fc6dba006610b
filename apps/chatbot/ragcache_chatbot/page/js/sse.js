// Server-sent events out of a fetched body. EventSource can neither post nor send a key.

/** @typedef {{event: string, data: string}} ServerEvent */

/**
 * @param {ReadableStream<Uint8Array>} body
 * @returns {AsyncGenerator<ServerEvent>} events in order; ends with the body, a last event that is not whole is dropped
 */
export async function* serverEvents(body) {
  let event = "message";
  /** @type {string[]} */
  let data = [];
  for await (const line of lines(body)) {
    if (line === "") {
      if (data.length) yield { event, data: data.join("\n") };
      event = "message";
      data = [];
    } else if (!line.startsWith(":")) {
      const colon = line.indexOf(":");
      const field = colon < 0 ? line : line.slice(0, colon);
      const value = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "");
      if (field === "data") data.push(value);
      else if (field === "event") event = value;
    }
  }
}

/**
 * @param {ReadableStream<Uint8Array>} body
 * @returns {AsyncGenerator<string>}
 */
async function* lines(body) {
  const reader = body.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      rest += decoder.decode(value, { stream: true });
      const found = rest.split(/\r\n|\n|\r(?!$)/);
      rest = found.pop() ?? "";
      yield* found;
    }
  } finally {
    reader.cancel().catch(() => {}); // whoever stopped reading wants no more of it; a broken body has nothing to cancel
  }
}
