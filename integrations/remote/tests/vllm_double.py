"""A test double of vLLM's completion server: it answers what a test tells it to."""

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class VllmDouble:
    """Serves a model under `name`.

    ids:       of every answer, a token an event; cached: prompt tokens that it says it did not compute
    wait_s:    before each event
    answer:    replaces the whole answer to a completion: called with the handler
    bodies, keys, traces: of the requests it got; left: set when a client hung up before the answer's end
    """

    def __init__(self, name: str, ids: list[int], cached: int | None = None, wait_s: float = 0.0) -> None:
        self.name, self.ids, self.cached, self.wait_s = name, ids, cached, wait_s
        self.models: bytes | None = None
        self.longest = 4096
        self.status = 200
        self.answer: Callable[[BaseHTTPRequestHandler], None] | None = None
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.traces: list[str | None] = []
        self.left = threading.Event()
        self.url = ""

    def events(self) -> Iterator[dict[str, Any]]:
        for rank, id in enumerate(self.ids):
            last = rank == len(self.ids) - 1
            yield {"choices": [{"index": 0, "text": "?", "token_ids": [id], "finish_reason": "stop" if last else None}]}
        details = None if self.cached is None else {"cached_tokens": self.cached}
        yield {"choices": [], "usage": {"prompt_tokens": 1, "prompt_tokens_details": details}}


@contextmanager
def serving(double: VllmDouble) -> Iterator[VllmDouble]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler_of(double))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=[0.02])
    thread.start()
    double.url = f"vllm://127.0.0.1:{server.server_port}"
    try:
        yield double
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def handler_of(double: VllmDouble) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            double.keys.append(self.headers.get("Authorization"))
            models = {"data": [{"id": "tiny"}, {"id": double.name, "max_model_len": double.longest}]}
            self.whole(double.status, json.dumps(models).encode() if double.models is None else double.models)

        def do_POST(self) -> None:
            double.keys.append(self.headers.get("Authorization"))
            double.traces.append(self.headers.get("traceparent"))
            double.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            try:
                double.answer(self) if double.answer is not None else self.stream()
            except OSError:
                double.left.set()

        def whole(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def begin(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()

        def event(self, event: dict[str, Any]) -> None:
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
            self.wfile.flush()

        def stream(self) -> None:
            self.begin()
            for event in double.events():
                time.sleep(double.wait_s)
                self.event(event)
            self.wfile.write(b"data: [DONE]\n\n")

        def endless(self) -> None:
            self.begin()
            while True:
                self.event({"choices": [{"index": 0, "text": "?", "token_ids": [double.ids[0]]}]})
                time.sleep(0.01)

        def silent(self) -> None:
            self.begin()
            self.wfile.flush()
            self.connection.recv(1)  # returns when the client hangs up
            double.left.set()

        def log_message(self, *_: object) -> None:
            pass

    return Handler


if __name__ == "__main__":  # as a process of its own, for a test that kills it
    with serving(VllmDouble("tiny", [5, 6, 7, 8], wait_s=0.05)) as made:
        print(made.url, flush=True)
        sys.stdin.read()
