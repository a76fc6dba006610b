// Posting a form. Only XMLHttpRequest says how much of a body has been sent.

/**
 * As `fetch` does it: a connection that fails or breaks is a TypeError, an abort an AbortError.
 * @param {URL} url
 * @param {{body: FormData, headers: Headers, signal?: AbortSignal | null}} init
 * @param {(share: number) => void} onSent how much has been sent, of 1
 * @returns {Promise<Response>} at the answer's head; its body follows as it comes
 */
export async function upload(url, { body, headers, signal }, onSent) {
  signal?.throwIfAborted();
  const request = new XMLHttpRequest();
  request.open("POST", url);
  headers.forEach((value, name) => request.setRequestHeader(name, value));
  request.upload.onprogress = ({ loaded, total }) => onSent(total ? loaded / total : 1);
  signal?.addEventListener("abort", () => request.abort());
  return new Promise((resolve, reject) => {
    const stream = received(request, reject);
    request.onreadystatechange = () => {
      if (request.readyState !== XMLHttpRequest.HEADERS_RECEIVED) return;
      const wait = request.getResponseHeader("Retry-After");
      resolve(new Response(stream, { status: request.status, headers: wait ? { "Retry-After": wait } : {} }));
    };
    request.send(body);
  });
}

/** What an answer brings. @param {XMLHttpRequest} request @param {(error: Error) => void} reject @returns {ReadableStream<Uint8Array>} */
function received(request, reject) {
  const encoder = new TextEncoder();
  let read = 0;
  return new ReadableStream({
    start(body) {
      const take = () => {
        body.enqueue(encoder.encode(request.responseText.slice(read)));
        read = request.responseText.length;
      };
      const fail = (/** @type {Error} */ error) => {
        reject(error);
        body.error(error);
      };
      request.onprogress = take;
      request.onload = () => {
        take();
        body.close();
      };
      request.onerror = () => fail(new TypeError("the connection failed"));
      request.onabort = () => fail(new DOMException("aborted", "AbortError"));
    },
    cancel() {
      request.onprogress = request.onload = null; // whoever stopped reading wants no more of it
    },
  });
}
