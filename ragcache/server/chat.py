"""POST /v1/chat/completions."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter, Depends, Query
from starlette.requests import Request
from starlette.responses import Response

from ragcache import Answer, Done, Reasoning, Sources, Token, ToolCall
from ragcache.engine.answer import Event
from ragcache.engine.options import AnswerDefaults
from ragcache.server import chat_types
from ragcache.server.answers import (
    Call,
    chat_citations,
    chat_logprobs,
    costs_of,
    dearest,
    each_of,
    engine_call,
    source_event,
    sources_of,
    usage_of,
)
from ragcache.server.body import JsonRoute
from ragcache.server.error_object import EventStream, event
from ragcache.server.http_errors import ApiError, errors, streamed
from ragcache.server.observe import METHOD, note, tell, waited_s
from ragcache.server.service import Service, ServiceParam, Work
from ragcache.server.tracing import traced
from ragcache.server.wire import AnswerModel

router = APIRouter(route_class=JsonRoute, tags=["answers"])
DONE = b"data: [DONE]\n\n"


async def _explains(
    request: Request,
    explain: Annotated[
        bool, Query(description="Say in `ragcache.reasons` why passages were read from KV or not")
    ] = False,
) -> None:
    request.state.explains = explain


EXPLAINS = Depends(_explains)
"""Dependency of the routes whose answers can be explained: those that `respond`."""


@router.post(
    "/v1/chat/completions",
    dependencies=[EXPLAINS],
    summary="Answer the last user message, from the store or from given documents",
    responses={
        200: streamed(
            chat_types.ChatCompletion, "The answer; with stream: true, events", chat_types.ChatCompletionChunk
        ),
        **errors(400, 404, 409, 413, 415, 503, 504),
    },
)
async def create_chat_completion(request: Request, service: ServiceParam, body: chat_types.ChatRequest) -> Response:
    retrieves = service.retrieves(body.model)
    call = await call_of(service, body, service.settings.answers, retrieves=retrieves)
    events = [service.kb.astream_chat(call.messages, **options) for options in each_of(call.options, body.n)]
    writer = Writer(service, request, body.model, names_tool=isinstance(body.tool_choice, chat_types.NamedTool))
    return await respond(writer, body, events, body.extension.timeout_s)


async def call_of(service: Service, body: chat_types.ChatRequest, defaults: AnswerDefaults, *, retrieves: bool) -> Call:
    """Return the engine call for a request; see `engine_call`.

    For a request with a JSON schema a thread makes it, because compiling a large schema takes a second.
    """
    make = partial(engine_call, body, defaults, service.kb.lm.max_positions, retrieves=retrieves)
    return await service.in_thread(make) if isinstance(body.response_format, chat_types.SchemaFormat) else make()


HEADERS_S = 1.0
"""Seconds that a stream waits for its first event before its headers are sent; later errors are sent as events."""


async def respond(
    writer: Writer, body: chat_types.SampledRequest, events: Sequence[AsyncIterator[Event]], timeout_s: float | None
) -> Response:
    """Return the response to a request, whole or as a stream.

    Each answer runs in its own slot. Answers to the same prompt share its placed context, as those of different users
    do.

    events: for each answer, its events from the engine
    timeout_s: the request's own time limit in seconds; None: only the server's limit applies

    Raises the error of an answer, unless the response is a stream that has begun; and ClientGoneError.
    """
    service, request = writer.service, writer.request
    work = service.answer(*(_counted(service, request, body, answer) for answer in events), timeout_s=timeout_s)
    begun = asyncio.ensure_future(anext(work))
    try:
        await work.unless_gone(request, asyncio.wait({begun}, timeout=HEADERS_S if body.stream else None))
        if begun.done() and isinstance(first := begun.result()[1], Sources):
            tell(request, METHOD, first.method)
    except BaseException:
        begun.cancel()
        work.cancel()
        raise
    if body.stream:
        return writer.stream(_chunks(writer, begun, work, usage=body.wants_usage), writer.failed, work.cancel)
    return writer.completion(await work.unless_gone(request, _answers(work))).to_response()


async def _chunks(
    writer: Writer, begun: asyncio.Future[tuple[int, Event]], work: Work[Event], *, usage: bool
) -> AsyncIterator[bytes]:
    """Yield the chunks of the stream, once its first event is there."""
    index, first = await begun
    async for chunk in writer.chunks(index, first, work, usage=usage):
        yield chunk


async def _answers(work: Work[Event]) -> list[Answer]:
    last = {index: event async for index, event in work}
    return [_answer(last.get(index)) for index in range(len(work.tasks))]


async def _counted(
    service: Service, request: Request, body: chat_types.SampledRequest, events: AsyncIterator[Event]
) -> AsyncGenerator[Event, None]:
    """Yield the events with timings that begin at the request's arrival. The answer is counted, and recorded if there
    is a log of requests, even if its reader has hung up.
    """
    queue_s, last = waited_s(request), 0.0
    with traced(request.headers, service.chat_model, queue_s) as ends:
        async with aclosing(events) as open_events:  # type: ignore[type-var]
            async for one in open_events:
                if isinstance(one, Done):
                    answer = replace(one.answer, timings=one.answer.timings.behind(queue_s))
                    if getattr(request.state, "explains", False):
                        reasons = await service.in_thread(answer.explain)  # it compares the prompt with all passages
                        answer = replace(answer, reasons=partial(tuple, reasons))
                    service.count_answer(answer)
                    ends(answer)
                    if service.log is not None and isinstance(body, chat_types.ChatRequest):
                        await service.in_thread(service.log.write, body.messages, answer)  # it counts tokens
                    yield Done(answer)
                else:
                    if isinstance(one, Token | Reasoning):
                        now = time.perf_counter()
                        if last:
                            service.metrics.inter_token.observe(now - last)
                        last = now
                    yield one


def _answer(last: Event | None) -> Answer:
    if isinstance(last, Done):
        return last.answer
    raise ApiError(500, "the engine ended without an answer", "internal_error")


@dataclass
class Writer:
    """Writes the answers to a request in OpenAI's format; all objects carry the same id, time, model and fingerprint.

    names_tool: whether the request names the function to call; such an answer ends with "stop"
    prompts: the number of prompts that the answers belong to
    calls: tool calls so far, by answer
    """

    stream: ClassVar[type[EventStream]] = EventStream
    service: Service
    request: Request
    model: str
    id: str = field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))
    names_tool: bool = False
    prompts: int = 1
    calls: Counter[int] = field(default_factory=Counter)

    def completion(self, answers: Sequence[Answer]) -> AnswerModel:
        costliest = dearest(answers)
        return chat_types.ChatCompletion(
            object="chat.completion",
            choices=[self.choice(index, answer) for index, answer in enumerate(answers)],
            usage=usage_of(answers),
            ragcache=chat_types.ChatExtension(sources=sources_of(costliest.hits), **self.costs(costliest)),
            **self.common(),
        )

    def choice(self, index: int, answer: Answer) -> chat_types.Choice:
        calls = [chat_types.MessageCall(**call.to_json()) for call in answer.tool_calls]
        content = answer.text or (None if calls else "")
        more: dict[str, Any] = {"annotations": chat_citations(answer), **({"tool_calls": calls} if calls else {})}
        if answer.reasoning:
            more["reasoning_content"] = answer.reasoning
        message = chat_types.AnswerMessage(role="assistant", content=content, refusal=None, **more)
        logprobs = None if answer.logprobs is None else chat_logprobs(answer.logprobs)
        return chat_types.Choice(index=index, message=message, logprobs=logprobs, finish_reason=self.reason(answer))

    def piece(self, index: int, event: Event) -> Any:
        """Return an event as a choice of a chunk."""
        delta, logprobs = chat_types.Delta(), None
        if isinstance(event, Sources):
            delta = chat_types.Delta(role="assistant", content="", refusal=None)
        elif isinstance(event, Token):
            delta = chat_types.Delta(content=event.text) if event.text else delta
            logprobs = chat_logprobs(event.logprobs) if event.logprobs else None
        elif isinstance(event, Reasoning):
            delta = chat_types.Delta(reasoning_content=event.text)
        elif isinstance(event, ToolCall):
            delta = chat_types.Delta(tool_calls=[chat_types.DeltaCall(index=self.calls[index], **event.to_json())])
            self.calls[index] += 1
        elif isinstance(event, Done) and (cited := chat_citations(event.answer)):
            delta = chat_types.Delta(annotations=cited)
        reason = self.reason(event.answer) if isinstance(event, Done) else None
        return chat_types.ChunkChoice(index=index, delta=delta, logprobs=logprobs, finish_reason=reason)

    def reason(self, answer: Answer) -> Literal["stop", "length", "tool_calls"]:
        if answer.finish_reason == "tool_calls":
            return "stop" if self.names_tool else "tool_calls"
        return reason_of(answer)

    async def chunks(self, rank: int, first: Event, work: Work[Event], *, usage: bool) -> AsyncIterator[bytes]:
        """Yield the chunks of the stream.

        rank: index of the answer that `first` belongs to
        """
        more: dict[str, Any] = {"usage": None} if usage else {}  # as in OpenAI's streams, the last chunk has the values
        first = first if isinstance(first, Sources) else Sources([])
        found = chat_types.ChatExtension(sources=sources_of(first.hits))
        shown = {"event": shown} if (shown := source_event(first.hits)) else {}
        yield _event(self.event([self.piece(rank, first)], ragcache=found, **shown, **more))
        answers: dict[int, Answer] = {}
        async for index, item in work:
            costs = {}
            if isinstance(item, Done):
                answers[index] = item.answer
                costs = {"ragcache": chat_types.ChatExtension(**self.costs(item.answer))}
            yield _event(self.event([self.piece(index, item)], **costs, **more))
        if usage:
            yield _event(self.event([], usage=usage_of([answers[rank] for rank in sorted(answers)], self.prompts)))
        yield DONE

    def failed(self, error: Exception) -> bytes:
        """Return the error as the stream's last event."""
        return event(self.problem(error).body().to_json())

    def problem(self, error: Exception) -> ApiError:
        problem = self.service.told(error, self.request)
        note(self.request, error=problem.code)
        return problem

    def event(self, choices: list[Any], **more: Any) -> AnswerModel:
        return chat_types.ChatCompletionChunk(object="chat.completion.chunk", choices=choices, **more, **self.common())

    def common(self) -> dict[str, Any]:
        fingerprint = f"fp_{self.service.kb.lm.fingerprint[:12]}"
        return {"id": self.id, "created": self.created, "model": self.model, "system_fingerprint": fingerprint}

    def costs(self, answer: Answer) -> dict[str, Any]:
        note(
            self.request,
            fusion=answer.method,
            passages=len(answer.hits),
            usage=asdict(answer.usage),
            timings={name: round(seconds, 6) for name, seconds in asdict(answer.timings).items()},
            finish_reason=answer.finish_reason,
        )
        explains = getattr(self.request.state, "explains", False)
        reasons = [chat_types.ReasonItem(**asdict(one)) for one in answer.explain()] if explains else []
        return {**costs_of(answer, self.service.kb), **({"reasons": reasons} if explains else {})}


def _event(body: AnswerModel) -> bytes:
    return event(body.to_json())


def reason_of(answer: Answer) -> Literal["stop", "length"]:
    return "stop" if answer.finish_reason == "stop" else "length"
