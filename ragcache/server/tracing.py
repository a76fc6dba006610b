"""Spans of answers for OpenTelemetry, with the names of its GenAI conventions. Off unless an exporter is named."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

from ragcache import Answer
from ragcache.errors import ConfigError

VARIABLES = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
NS = 1_000_000_000


@cache
def tracer() -> Any:
    """Return the tracer, or None if no exporter is named. Raises ConfigError if OpenTelemetry is not installed."""
    if not any(os.environ.get(name) for name in VARIABLES):
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError(f"{VARIABLES[0]} is set; pip install 'ragcache-kv[otel]', or unset it") from error
    name = os.environ.get("OTEL_SERVICE_NAME", "ragcache")
    provider = TracerProvider(resource=Resource.create({SERVICE_NAME: name}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider.get_tracer("ragcache")


@contextmanager
def traced(headers: Mapping[str, str], model: str, waited_s: float) -> Iterator[Callable[[Answer], None]]:
    """Write a span for an answer, with a span for each phase of its timings. Yield a function to call with the answer.

    Within the `with` block the span is the trace context of this task: requests that the task makes name the span as
    their parent. The span of an answer that fails has the error's class.

    headers:  the request's headers; a W3C trace context in them becomes the parent
    model:    the name that requests call the model
    waited_s: seconds since the request's arrival
    """
    if (writer := tracer()) is None:
        yield lambda answer: None
        return
    from opentelemetry.context import attach
    from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    start, parent = time.time_ns() - int(waited_s * NS), TraceContextTextMapPropagator().extract(headers)
    own = {"gen_ai.operation.name": "chat", "gen_ai.provider.name": "ragcache", "gen_ai.request.model": model}
    whole = writer.start_span(f"chat {model}", parent, SpanKind.SERVER, own, start_time=start)
    attach(set_span_in_context(whole))  # ends with the task
    answers: list[Answer] = []
    try:
        yield answers.append
    except BaseException as error:
        if not answers:
            whole.set_attribute("error.type", type(error).__name__)
            whole.set_status(Status(StatusCode.ERROR))
        raise
    finally:
        for answer in answers:
            whole.set_attributes(_attributes(answer))
            _write_phases(writer, set_span_in_context(whole), answer, start)
        whole.end(start + int(answers[0].timings.total_s * NS) if answers else None)


def _attributes(answer: Answer) -> dict[str, Any]:
    usage = answer.usage
    return {
        "gen_ai.response.finish_reasons": (answer.finish_reason,),
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
        "gen_ai.usage.cache_creation.input_tokens": usage.created_tokens,
        "ragcache.method": answer.method,
        "ragcache.passages": len(answer.hits),
    }


def _write_phases(writer: Any, inside: Any, answer: Answer, start: int) -> None:
    times, at = answer.timings, start
    phases = {
        "queue": times.queue_s,
        "retrieve": times.retrieve_s,
        "load": times.load_s,
        "compute": times.encode_s,
        "place": times.place_s,
        "prefill": times.prefill_s,
    }
    for name, seconds in phases.items():
        if seconds > 0:
            end = at + int(seconds * NS)
            writer.start_span(name, inside, start_time=at).end(end)
            at = end
    end, first = start + int(times.total_s * NS), start + int(times.ttft_s * NS)
    writer.start_span("decode", inside, start_time=first).end(end)
