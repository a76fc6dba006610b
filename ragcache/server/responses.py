"""POST /v1/responses: a chat in the shapes of OpenAI's newer API."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Literal

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ragcache import Answer, Done, Sampling, Sources, Token
from ragcache.engine.answer import Event
from ragcache.server.answering import engine_call, sources_of
from ragcache.server.body import read_json, request_body
from ragcache.server.chat import Writer, respond
from ragcache.server.observe import note
from ragcache.server.openapi import errors, streamed
from ragcache.server.schemas.base import AnswerModel
from ragcache.server.schemas.completion import ChatExtension
from ragcache.server.schemas.responses import (
    IncompleteDetails,
    InputTokensDetails,
    OutputMessage,
    OutputText,
    OutputTokensDetails,
    ResponseEvent,
    ResponseObject,
    ResponsesRequest,
    ResponseUsage,
)
from ragcache.server.service import service_of
from ragcache.server.sse import event
from ragcache.server.work import RunningTask, merged

router = APIRouter(tags=["answers"])
Status = Literal["in_progress", "completed", "incomplete"]
Say = Callable[..., bytes]


@router.post(
    "/v1/responses",
    summary="Answer the last user message, in the shapes of OpenAI's newer API",
    responses={
        200: streamed(ResponseObject, "The answer; with stream: true, events whose data are ResponseEvent"),
        **errors(400, 404, 409, 413, 415, 503, 504),
    },
    openapi_extra=request_body(json=ResponsesRequest),
)
async def create_response(request: Request) -> Response:
    service = service_of(request)
    asked = await read_json(request, ResponsesRequest)
    service.check_model(asked.model, service.chat_model)
    chat = asked.as_chat()
    call = engine_call(chat, service.settings.answers, service.kb.lm.max_positions)
    writer = ResponseWriter(service, request, asked=asked, sampling=call.options["sampling"])
    events = service.kb.astream_chat(call.messages, **call.options)
    return await respond(writer, chat, [events], asked.extension.timeout_s)


@dataclass
class ResponseWriter(Writer):
    """Writes one answer in the shapes of OpenAI's newer API. item: id of its message"""

    id: str = field(default_factory=lambda: f"resp_{uuid.uuid4().hex}")
    item: str = field(default_factory=lambda: f"msg_{uuid.uuid4().hex}")
    asked: ResponsesRequest = field(kw_only=True)
    sampling: Sampling = field(kw_only=True)

    def completion(self, answers: Sequence[Answer]) -> AnswerModel:
        return self.whole(answers[0])

    async def chunks(self, first: Event, works: Sequence[RunningTask[Event]], *, usage: bool) -> AsyncIterator[bytes]:
        """The stream. Once it has begun an error can only be told inside of it."""
        numbers = count()

        def say(type: str, **fields: Any) -> bytes:
            return event(ResponseEvent(type=type, sequence_number=next(numbers), **fields).to_json(), type)

        try:
            for said in self._begin(say, first):
                yield said
            async for _, one in merged(works):
                if isinstance(one, Token) and one.text:
                    yield say("response.output_text.delta", **self._place(), delta=one.text, logprobs=[])
                elif isinstance(one, Done):
                    for said in self._end(say, one.answer):
                        yield said
        except Exception as error:
            problem = self.service.told(error, self.request)
            note(self.request, error=problem.code)
            yield say("error", code=problem.code, message=problem.body().error.message, param=problem.param)

    def _begin(self, say: Say, first: Event) -> Iterator[bytes]:
        found = ChatExtension(sources=sources_of(first.hits if isinstance(first, Sources) else []))
        for name in ("response.created", "response.in_progress"):
            yield say(name, response=self.response("in_progress", [], None, found))
        yield say("response.output_item.added", output_index=0, item=self.message("in_progress", []))
        yield say("response.content_part.added", **self._place(), part=_part(""))

    def _end(self, say: Say, answer: Answer) -> Iterator[bytes]:
        whole, part = self.whole(answer), _part(answer.text)
        yield say("response.output_text.done", **self._place(), text=answer.text, logprobs=[])
        yield say("response.content_part.done", **self._place(), part=part)
        yield say("response.output_item.done", output_index=0, item=whole.output[0])
        yield say(f"response.{whole.status}", response=whole)

    def whole(self, answer: Answer) -> ResponseObject:
        status: Status = "completed" if answer.finish_reason == "stop" else "incomplete"
        costs = ChatExtension(sources=sources_of(answer.hits), **self.costs(answer))
        return self.response(status, [self.message(status, [_part(answer.text)])], _usage(answer), costs)

    def response(
        self, status: Status, output: list[OutputMessage], usage: ResponseUsage | None, costs: ChatExtension
    ) -> ResponseObject:
        return ResponseObject(
            id=self.id,
            object="response",
            created_at=self.created,
            model=self.service.chat_model,
            status=status,
            error=None,
            incomplete_details=IncompleteDetails(reason="max_output_tokens") if status == "incomplete" else None,
            instructions=self.asked.instructions,
            output=output,
            parallel_tool_calls=False,
            previous_response_id=None,
            temperature=self.sampling.temperature,
            top_p=1.0 if self.sampling.top_p is None else self.sampling.top_p,
            tool_choice="none",
            tools=[],
            metadata=self.asked.metadata or {},
            usage=usage,
            ragcache=costs,
        )

    def message(self, status: Status, content: list[OutputText]) -> OutputMessage:
        return OutputMessage(id=self.item, type="message", role="assistant", status=status, content=content)

    def _place(self) -> dict[str, Any]:
        return {"item_id": self.item, "output_index": 0, "content_index": 0}


def _part(text: str) -> OutputText:
    return OutputText(type="output_text", text=text, annotations=[], logprobs=[])


def _usage(answer: Answer) -> ResponseUsage:
    usage = answer.usage
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputTokensDetails(cached_tokens=usage.cached_tokens),
        output_tokens=usage.completion_tokens,
        output_tokens_details=OutputTokensDetails(reasoning_tokens=0),
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
    )
