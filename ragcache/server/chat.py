"""POST /v1/chat/completions."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ragcache import Answer, Done, Sources, Token
from ragcache.engine.answer import Event
from ragcache.server.answering import costs_of, engine_call, sources_of, usage_of
from ragcache.server.body import JSON, read_json, request_body
from ragcache.server.errors import ApiError
from ragcache.server.observe import note, waited_s
from ragcache.server.openapi import errors, streamed
from ragcache.server.schemas.chat import ChatRequest
from ragcache.server.schemas.completion import (
    AnswerMessage,
    ChatCompletion,
    ChatCompletionChunk,
    ChatExtension,
    Choice,
    ChunkChoice,
    Delta,
)
from ragcache.server.service import Service, service_of
from ragcache.server.sse import EventStream, event
from ragcache.server.work import Work, unless_gone

router = APIRouter(tags=["answers"])
DONE = b"data: [DONE]\n\n"


@router.post(
    "/v1/chat/completions",
    summary="Answer the last user message, from the store or from given documents",
    responses={
        200: streamed(ChatCompletion, "The answer; with stream: true, events whose data are ChatCompletionChunk"),
        **errors(400, 404, 409, 413, 415, 503, 504),
    },
    openapi_extra=request_body(json=ChatRequest),
)
async def create_chat_completion(request: Request) -> Response:
    service = service_of(request)
    asked = await read_json(request, ChatRequest)
    service.check_model(asked.model, service.chat_model)
    call = engine_call(asked, service.settings.answers, service.kb.lm.max_positions)
    events = service.kb.astream_chat(call.messages, **call.options)
    work = service.answer(_counted(service, request, events), asked.extension.timeout_s)
    writer = Writer(service, request)
    try:
        first = await unless_gone(request, anext(work))
        if asked.stream:
            return EventStream(writer.chunks(first, work, usage=asked.wants_usage), work.cancel)
        last = await unless_gone(request, work.last())
    except BaseException:
        work.cancel()
        raise
    return Response(writer.completion(_answer(last)).to_json(), media_type=JSON)


async def _counted(service: Service, request: Request, events: AsyncIterator[Event]) -> AsyncGenerator[Event, None]:
    """The same events, once there is a slot; the answer's times begin at the request's arrival. The answer is counted
    even when its reader has gone."""
    queue_s = waited_s(request)
    async with aclosing(events) as open_events:  # type: ignore[type-var]
        async for one in open_events:
            if isinstance(one, Done):
                answer = replace(one.answer, timings=one.answer.timings.behind(queue_s))
                service.metrics.count_answer(answer)
                yield Done(answer)
            else:
                yield one


def _answer(last: Event) -> Answer:
    if isinstance(last, Done):
        return last.answer
    raise ApiError(500, "the engine ended without an answer", code="internal_error", type="server_error")


@dataclass
class Writer:
    """Writes one answer in OpenAI's shapes: all of its objects carry the same id, time, model and fingerprint."""

    service: Service
    request: Request
    id: str = field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    def completion(self, answer: Answer) -> ChatCompletion:
        message = AnswerMessage(role="assistant", content=answer.text, refusal=None, annotations=[])
        choice = Choice(index=0, message=message, logprobs=None, finish_reason=_reason(answer))
        return ChatCompletion(
            object="chat.completion",
            choices=[choice],
            usage=usage_of(answer),
            ragcache=ChatExtension(sources=sources_of(answer.hits), **self._costs(answer)),
            **self._common(),
        )

    async def chunks(self, first: Event, rest: Work[Event], *, usage: bool) -> AsyncIterator[bytes]:
        """The stream. Once it has begun an error can only be told inside of it."""
        try:
            hits = first.hits if isinstance(first, Sources) else []
            start = Delta(role="assistant", content="", refusal=None)
            yield self._chunk(start, None, usage, ragcache=ChatExtension(sources=sources_of(hits)))
            async for one in rest:
                if isinstance(one, Token):
                    yield self._chunk(Delta(content=one.text), None, usage)
                elif isinstance(one, Done):
                    costs = ChatExtension(**self._costs(one.answer))
                    yield self._chunk(Delta(), _reason(one.answer), usage, ragcache=costs)
                    if usage:
                        yield self._usage(one.answer)
            yield DONE
        except Exception as error:
            problem = self.service.told(error)
            note(self.request, error=problem.code)
            yield event(problem.body().to_json())

    def _chunk(self, delta: Delta, reason: Literal["stop", "length"] | None, usage: bool, **more: Any) -> bytes:
        choice = ChunkChoice(index=0, delta=delta, logprobs=None, finish_reason=reason)
        if usage:
            more["usage"] = None  # as OpenAI does: the key is in every chunk, its value in the last one
        return self._event(choices=[choice], **more)

    def _usage(self, answer: Answer) -> bytes:
        return self._event(choices=[], usage=usage_of(answer))

    def _event(self, **fields: Any) -> bytes:
        return event(ChatCompletionChunk(object="chat.completion.chunk", **fields, **self._common()).to_json())

    def _common(self) -> dict[str, Any]:
        fingerprint = f"fp_{self.service.kb.lm.fingerprint[:12]}"
        return {
            "id": self.id,
            "created": self.created,
            "model": self.service.chat_model,
            "system_fingerprint": fingerprint,
        }

    def _costs(self, answer: Answer) -> dict[str, Any]:
        note(
            self.request,
            fusion=answer.method,
            passages=len(answer.hits),
            usage=asdict(answer.usage),
            timings={name: round(seconds, 6) for name, seconds in asdict(answer.timings).items()},
            finish_reason=answer.finish_reason,
        )
        return costs_of(answer, self.service.kb)


def _reason(answer: Answer) -> Literal["stop", "length"]:
    return "stop" if answer.finish_reason == "stop" else "length"
