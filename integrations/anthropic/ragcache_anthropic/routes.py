"""/v1/messages: chats in the format of Anthropic's API, with cache points and its errors."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ragcache import Answer, Done, Reasoning, Sources, Token, ToolCall
from ragcache.engine.answer import Event
from ragcache.engine.options import CachePoint
from ragcache.models.thoughts import thinking_of
from ragcache.server.answers import sources_of, turns
from ragcache.server.body import JsonRoute
from ragcache.server.chat import EXPLAINS, Writer, call_of, respond
from ragcache.server.chat_types import ChatExtension
from ragcache.server.error_object import event
from ragcache.server.http_errors import ApiError, errors, streamed
from ragcache.server.service import Service, ServiceParam, Work
from ragcache.server.wire import AnswerModel
from ragcache_anthropic import bodies

ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
    504: "timeout_error",
}


class AnthropicRouter(APIRouter):
    """A router whose errors have Anthropic's form."""

    @staticmethod
    def error_body(problem: ApiError) -> bodies.AnthropicError:
        kind = "invalid_request_error" if problem.status_code < 500 else "api_error"
        message = problem.body().error.message
        return bodies.AnthropicError(
            type="error", error=bodies.ErrorInfo(type=ERROR_TYPES.get(problem.status_code, kind), message=message)
        )


router = AnthropicRouter(prefix="/v1/messages", route_class=JsonRoute, tags=["anthropic"])


failures = partial(errors, model=bodies.AnthropicError)
"""Returns the `responses` of a route for errors with these status codes, in Anthropic's form."""


@router.post(
    "",
    dependencies=[EXPLAINS],
    summary="Answer the last user message, in the format of Anthropic's API",
    responses={
        200: streamed(bodies.AnthropicMessage, "The answer; with stream: true, events", bodies.MessageEvent),
        **failures(400, 404, 409, 413, 415, 503, 504),
    },
)
async def create_message(request: Request, service: ServiceParam, asked: bodies.MessagesRequest) -> Response:
    chat, retrieves = asked.chat(thinks=_thinks(service)), service.retrieves(asked.model)
    call = await call_of(service, chat, service.settings.answers, retrieves=retrieves)
    pins = [CachePoint(turns(asked.head(point)), point.ttl_s) for point in asked.points]
    events = service.kb.astream_chat(call.messages, **call.options, pins=pins)
    shows = asked.thinking is None or asked.thinking.display != "omitted"
    return await respond(
        MessagesWriter(service, request, asked.model, shows_thoughts=shows), chat, [events], asked.extension.timeout_s
    )


@router.post(
    "/count_tokens",
    summary="Count a prompt's tokens, without the passages that would be retrieved for it",
    responses=failures(400, 404, 413, 415, 503, 504),
)
async def count_tokens(request: Request, service: ServiceParam, asked: bodies.CountRequest) -> bodies.TokenTotal:
    service.retrieves(asked.model)
    chat = asked.as_chat(thinks=_thinks(service))
    call = await call_of(service, chat, service.settings.answers, retrieves=False)
    count = partial(service.kb.count_chat, call.messages, **call.options)
    return bodies.TokenTotal(input_tokens=await service.compute(request, count))


def _thinks(service: Service) -> bool:
    return thinking_of(service.kb.lm.tokenizer) is not None


@dataclass
class MessagesWriter(Writer):
    """Writes an answer in Anthropic's format.

    shows_thoughts: whether blocks of the model's reasoning have their text
    open:  type of the stream's block in progress; "": none
    index: number of the block begun last
    """

    id: str = field(default_factory=lambda: f"msg_{uuid.uuid4().hex}")
    shows_thoughts: bool = field(default=True, kw_only=True)
    open: str = field(default="", kw_only=True)
    index: int = field(default=-1, kw_only=True)

    def completion(self, answers: Sequence[Answer]) -> AnswerModel:
        (one,) = answers
        thoughts = bodies.AnswerBlock(type="thinking", thinking=self._thought(one.reasoning), signature="")
        text = bodies.AnswerBlock(type="text", text=one.text, citations=None)
        content = [*([thoughts] if one.reasoning else []), *([text] if one.text else []), *map(_block, one.tool_calls)]
        found = ChatExtension(sources=sources_of(one.hits), **self.costs(one))
        ending = {"stop_reason": reason_of(one), "stop_sequence": one.stop or None}
        return self.message(content=content, usage=usage_of(one), ragcache=found, **ending)

    async def chunks(self, rank: int, first: Event, work: Work[Event], *, usage: bool) -> AsyncIterator[bytes]:
        """Yield the events of the stream. The first event has no usage yet: it is known at the end."""
        found = ChatExtension(sources=sources_of(first.hits if isinstance(first, Sources) else []))
        nothing = bodies.MessageUsage(
            input_tokens=0, cache_creation_input_tokens=0, cache_read_input_tokens=0, output_tokens=0
        )
        begun = self.message(content=[], usage=nothing, ragcache=found, stop_reason=None, stop_sequence=None)
        yield _say("message_start", message=begun)
        async for _, one in work:
            if isinstance(one, Done):
                for said in self._close():
                    yield said
                end = bodies.MessageEnd(stop_reason=reason_of(one.answer), stop_sequence=one.answer.stop or None)
                costs = ChatExtension(**self.costs(one.answer))
                yield _say("message_delta", delta=end, usage=usage_of(one.answer), ragcache=costs)
                yield _say("message_stop")
            else:
                for said in self._piece(one):
                    yield said

    def _piece(self, one: Event) -> Iterator[bytes]:
        """Yield the events of a piece of the answer."""
        if isinstance(one, Reasoning):
            yield from self._begin("thinking", bodies.AnswerBlock(type="thinking", thinking="", signature=""))
            yield self._delta(bodies.BlockDelta(type="thinking_delta", thinking=self._thought(one.text)))
        elif isinstance(one, ToolCall):
            yield from self._close()
            block = _block(one)
            yield from self._begin("tool_use", block.model_copy(update={"input": {}}))
            written = json.dumps(block.input, ensure_ascii=False)
            yield self._delta(bodies.BlockDelta(type="input_json_delta", partial_json=written))
        elif isinstance(one, Token) and one.text:
            yield from self._begin("text", bodies.AnswerBlock(type="text", text="", citations=None))
            yield self._delta(bodies.BlockDelta(type="text_delta", text=one.text))

    def _begin(self, kind: str, block: bodies.AnswerBlock) -> Iterator[bytes]:
        """Yield the events that begin a block, unless the block in progress is of this type."""
        if self.open == kind:
            return
        yield from self._close()
        self.open, self.index = kind, self.index + 1
        yield _say("content_block_start", index=self.index, content_block=block)

    def _close(self) -> Iterator[bytes]:
        if self.open == "thinking":
            yield self._delta(bodies.BlockDelta(type="signature_delta", signature=""))
        if self.open:
            yield _say("content_block_stop", index=self.index)
        self.open = ""

    def _delta(self, delta: bodies.BlockDelta) -> bytes:
        return _say("content_block_delta", index=self.index, delta=delta)

    def _thought(self, text: str) -> str:
        return text if self.shows_thoughts else ""

    def failed(self, error: Exception) -> bytes:
        return event(AnthropicRouter.error_body(self.problem(error)).to_json(), "error")

    def message(self, **fields: Any) -> bodies.AnthropicMessage:
        return bodies.AnthropicMessage(id=self.id, type="message", role="assistant", model=self.model, **fields)


def reason_of(answer: Answer) -> bodies.StopReason:
    if answer.finish_reason == "tool_calls":
        return "tool_use"
    if answer.finish_reason == "length":
        return "max_tokens"
    return "stop_sequence" if answer.stop else "end_turn"


def usage_of(answer: Answer) -> bodies.MessageUsage:
    """Return the usage. Tokens before a cache point that were not read from KV are counted as created."""
    usage = answer.usage
    created = max(usage.created_tokens, usage.pinned_tokens - usage.cached_tokens)
    created = min(created, usage.prompt_tokens - usage.cached_tokens)
    return bodies.MessageUsage(
        input_tokens=usage.prompt_tokens - usage.cached_tokens - created,
        cache_creation_input_tokens=created,
        cache_read_input_tokens=usage.cached_tokens,
        output_tokens=usage.completion_tokens,
    )


def _block(call: ToolCall) -> bodies.AnswerBlock:
    """Return a call with its arguments as an object. If they are not an object, their text is put into an object."""
    given = json.loads(call.arguments) if call.error is None else {"arguments": call.arguments}
    return bodies.AnswerBlock(type="tool_use", id=call.id, name=call.name, input=given)


def _say(kind: str, **fields: Any) -> bytes:
    return event(bodies.MessageEvent(type=kind, **fields).to_json(), kind)
