"""/api/chat and /api/generate: answers as JSON or as lines of JSON."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ragcache import Answer, Done, Reasoning, Token, ToolCall
from ragcache.engine.answer import Event
from ragcache.models.thoughts import thinking_of
from ragcache.server.answers import chat_logprobs, read_options, sources_of
from ragcache.server.chat import EXPLAINS, Writer, call_of, respond
from ragcache.server.chat_types import ChatExtension, Message
from ragcache.server.error_object import EventStream
from ragcache.server.http_errors import ApiError, Responses
from ragcache.server.service import Work, seen_service, service_of
from ragcache.server.wire import AnswerModel
from ragcache_ollama import bodies
from ragcache_ollama.form import NDJSON, NS, AnyTypeRoute, OllamaRouter, failures, lines, now, served_name

router = APIRouter(route_class=AnyTypeRoute)
ANSWERED: Responses = {
    200: lines(bodies.Part, "The answer; in lines, unless stream is false"),
    **failures(400, 404, 409, 413, 503, 504),
}


@router.post("/chat", summary="Answer the last user message", dependencies=[EXPLAINS], responses=ANSWERED)
async def chat(request: Request, asked: bodies.OllamaChatRequest) -> Response:
    if not asked.messages:
        return loaded(request, asked, message=bodies.AnswerTurn(role="assistant", content=""))
    return await answer(request, asked, bodies.messages_of(asked.messages), ChatWriter)


@router.post("/generate", summary="Answer a prompt", dependencies=[EXPLAINS], responses=ANSWERED)
async def generate(request: Request, asked: bodies.GenerateRequest) -> Response:
    if not asked.prompt:
        return loaded(request, asked, response="")
    turn = Message(role="user", content=asked.prompt)
    if not asked.raw:
        system = [Message(role="system", content=asked.system)] if asked.system else []
        return await answer(request, asked, [*system, turn], PromptWriter)
    if name := next(iter(asked.unlike_raw), None):
        raise ApiError(400, f"{name!r} does not go with raw; leave one of them out", "invalid_value", name)
    service = await seen_service(request)
    service.retrieves(served_name(service, asked.model))
    told = asked.as_chat(asked.model, [turn], (), thinks=False)
    options = read_options(told, asked.defaults(service.settings.answers), service.kb.lm.max_positions)
    events = service.kb.astream_completion(asked.prompt, **options)
    return await respond(PromptWriter(service, request, asked.model), told, [events], told.extension.timeout_s)


async def answer(
    request: Request, asked: bodies.AnswerRequest, messages: Sequence[Message], writer: type[OllamaWriter]
) -> Response:
    service = await seen_service(request)
    name = served_name(service, asked.model)
    retrieves, lm = service.retrieves(name), service.kb.lm
    tools = asked.tools or () if isinstance(asked, bodies.OllamaChatRequest) else ()
    told = asked.as_chat(name, messages, tools, thinks=thinking_of(lm.tokenizer) is not None)
    call = await call_of(service, told, asked.defaults(service.settings.answers), retrieves=retrieves)
    events = service.kb.astream_chat(call.messages, **call.options)
    return await respond(writer(service, request, asked.model), told, [events], told.extension.timeout_s)


def loaded(request: Request, asked: bodies.AnswerRequest, **empty: Any) -> Response:
    """Return the response to a request without a prompt, by which Ollama loads or unloads a model. This model is
    always loaded.
    """
    service = service_of(request)
    service.retrieves(served_name(service, asked.model))
    reason: Literal["load", "unload"] = "unload" if asked.keep_alive in (0, "0", "0s", "0m", "0h") else "load"
    return bodies.Part(model=asked.model, created_at=now(), done=True, done_reason=reason, **empty).to_response()


class Lines(EventStream):
    media_type = NDJSON
    heartbeat = b""  # lines of JSON cannot hold comments


@dataclass
class OllamaWriter(Writer):
    """Writes an answer in Ollama's format."""

    stream = Lines

    def said(self, text: str, thinking: str = "", calls: Sequence[ToolCall] = ()) -> dict[str, Any]:
        """Return the fields that hold a piece of an answer."""
        raise NotImplementedError

    def completion(self, answers: Sequence[Answer]) -> AnswerModel:
        (one,) = answers
        scores = {} if one.logprobs is None else {"logprobs": chat_logprobs(one.logprobs).content}
        return self.part(**self.said(one.text, one.reasoning, one.tool_calls), **scores, **self.end(one))

    async def chunks(self, rank: int, first: Event, work: Work[Event], *, usage: bool) -> AsyncIterator[bytes]:
        """Yield the lines of the stream."""
        async for _, one in work:
            if isinstance(one, Done):
                yield _line(self.part(**self.said(""), **self.end(one.answer)))
            elif isinstance(one, Token):
                scores = {"logprobs": chat_logprobs(one.logprobs).content} if one.logprobs else {}
                yield _line(self.part(**self.said(one.text), **scores, done=False))
            elif isinstance(one, Reasoning):
                yield _line(self.part(**self.said("", one.text), done=False))
            elif isinstance(one, ToolCall):
                yield _line(self.part(**self.said("", calls=[one]), done=False))

    def failed(self, error: Exception) -> bytes:
        return _line(OllamaRouter.error_body(self.problem(error)))

    def part(self, **fields: Any) -> bodies.Part:
        return bodies.Part(model=self.model, created_at=now(), **fields)

    def end(self, answer: Answer) -> dict[str, Any]:
        """Return the fields of the last line."""
        times, usage = answer.timings, answer.usage
        return {
            "done": True,
            "done_reason": "length" if answer.finish_reason == "length" else "stop",
            "total_duration": int(times.total_s * NS),
            "load_duration": 0,
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": int(max(0.0, times.ttft_s - times.queue_s) * NS),
            "eval_count": usage.completion_tokens,
            "eval_duration": int(max(0.0, times.total_s - times.ttft_s) * NS),
            "ragcache": ChatExtension(sources=sources_of(answer.hits), **self.costs(answer)),
        }


@dataclass
class ChatWriter(OllamaWriter):
    def said(self, text: str, thinking: str = "", calls: Sequence[ToolCall] = ()) -> dict[str, Any]:
        more: dict[str, Any] = {"thinking": thinking} if thinking else {}
        if calls:
            more["tool_calls"] = [bodies.AnswerCall(id=call.id, function=_called(call)) for call in calls]
        return {"message": bodies.AnswerTurn(role="assistant", content=text, **more)}


@dataclass
class PromptWriter(OllamaWriter):
    def said(self, text: str, thinking: str = "", calls: Sequence[ToolCall] = ()) -> dict[str, Any]:
        return {"response": text, **({"thinking": thinking} if thinking else {})}


def _called(call: ToolCall) -> bodies.AnswerFunction:
    """Return a call with its arguments as an object. If they are not an object, their text is put into an object."""
    arguments = json.loads(call.arguments) if call.error is None else {"arguments": call.arguments}
    return bodies.AnswerFunction(name=call.name, arguments=arguments)


def _line(part: AnswerModel) -> bytes:
    return f"{part.to_json()}\n".encode()
