"""Spans of answers, as OpenTelemetry's own exporter in memory receives them."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from ragcache.errors import ConfigError
from ragcache.server import tracing

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def test_an_answer_is_a_span_with_its_phases(served, exported):
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Where?"}], "max_tokens": 3}
    answer = served.http.post("/v1/chat/completions", json=body, headers={"traceparent": PARENT}).json()
    spans = {one.name: one for one in exported.get_finished_spans()}
    whole, usage = spans.pop("chat tiny"), answer["usage"]
    assert f"{whole.context.trace_id:032x}-{whole.parent.span_id:016x}" == PARENT[3:52]
    assert whole.attributes["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert whole.attributes["gen_ai.usage.output_tokens"] == 3
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert whole.attributes["gen_ai.usage.cache_read.input_tokens"] == cached
    assert spans.keys() >= {"retrieve", "prefill", "decode"}
    for span in spans.values():
        assert span.parent.span_id == whole.context.span_id
        assert whole.start_time <= span.start_time <= span.end_time
    took = whole.end_time - whole.start_time
    assert took == pytest.approx(answer["ragcache"]["timings"]["total_s"] * 1e9, rel=0.01)


def test_an_answer_that_fails_is_a_span_with_its_error(served, exported):
    assert served.chat("Where? " * 5000).status_code == 400
    (span,) = exported.get_finished_spans()
    assert (span.attributes["error.type"], span.status.status_code.name) == ("ContextTooLongError", "ERROR")
    assert "Where?" not in span.to_json()


def test_a_collector_gets_the_spans_over_http(served, monkeypatch):
    """Decoded by OTLP's own messages, as Jaeger and Langfuse receive them."""
    received: list[tuple[str, bytes]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=server.serve_forever, args=[0.02], daemon=True).start()
    monkeypatch.setenv(tracing.VARIABLES[0], f"http://127.0.0.1:{server.server_port}")
    writer = tracing.tracer.__wrapped__()
    monkeypatch.setattr(tracing, "tracer", lambda: writer)
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Where?"}], "max_tokens": 3}
    served.http.post("/v1/chat/completions", json=body, headers={"traceparent": PARENT})
    writer.span_processor.force_flush()
    writer.span_processor.shutdown()
    server.shutdown()
    server.server_close()
    assert {path for path, _ in received} == {"/v1/traces"}
    found = [ExportTraceServiceRequest.FromString(data) for _, data in received]
    (resource,) = {one.value.string_value for part in found for held in part.resource_spans
                   for one in held.resource.attributes if one.key == "service.name"}  # fmt: skip
    spans = {span.name: span for part in found for held in part.resource_spans
             for scope in held.scope_spans for span in scope.spans}  # fmt: skip
    assert resource == "ragcache"
    assert spans.keys() >= {"chat tiny", "retrieve", "prefill", "decode"}
    assert {span.trace_id.hex() for span in spans.values()} == {PARENT[3:35]}


def test_nothing_is_traced_unless_an_exporter_is_named(monkeypatch):
    for name in tracing.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert tracing.tracer.__wrapped__() is None


def test_an_exporter_without_its_library_is_an_error(monkeypatch):
    monkeypatch.setenv(tracing.VARIABLES[0], "http://127.0.0.1:9")
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"ragcache-kv\[otel\]"):
        tracing.tracer.__wrapped__()
