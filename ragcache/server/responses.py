"""POST /v1/responses: a chat in the shapes of OpenAI's newer API."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import Field, JsonValue, field_validator
from starlette.requests import Request
from starlette.responses import Response

from ragcache import Answer, Done, Sampling, Sources, Token
from ragcache.engine.answer import Event
from ragcache.models.thoughts import Effort
from ragcache.server.answers import citations, engine_call, sources_of
from ragcache.server.body import read_json, request_body
from ragcache.server.chat import Writer, respond
from ragcache.server.chat_types import (
    ChatExtension,
    ChatRequest,
    Extension,
    Ignored,
    JsonFormat,
    JsonSchema,
    Message,
    Nothing,
    PlainFormat,
    SchemaFormat,
    StreamOptions,
    TextPart,
    TokenCount,
)
from ragcache.server.http_errors import errors, streamed
from ragcache.server.service import RunningTask, merged, service_of
from ragcache.server.wire import AnswerModel, LooseModel, Name, RequestModel, Text, event


class InputPart(LooseModel):
    """A part of a message. Only text can be read; parts of answers come back as they were given out."""

    type: Literal["input_text", "output_text"]
    text: Text


class InputMessage(LooseModel):
    """A turn; an answer may be sent back as it came."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Text | list[InputPart]

    def as_message(self) -> Message:
        if isinstance(self.content, str):
            return Message(role=self.role, content=self.content)
        return Message(role=self.role, content=[TextPart(type="text", text=part.text) for part in self.content])


class ReasoningItem(LooseModel):
    """What another service's model thought, sent back with its answer. It is read over."""

    type: Literal["reasoning"]


class FlatSchemaFormat(JsonSchema):
    type: Literal["json_schema"]

    def as_format(self) -> SchemaFormat:
        schema = JsonSchema(name=self.name, schema=self.schema_)
        return SchemaFormat(type="json_schema", json_schema=schema)


class TextOptions(RequestModel):
    format: Annotated[PlainFormat | JsonFormat | FlatSchemaFormat, Field(discriminator="type")] | None = None
    verbosity: None = None


class ReasoningField(LooseModel):
    """effort: how much the model thinks. What it thought is not given out, so that there is nothing to summarise."""

    effort: Effort | None = None


class ResponsesRequest(Ignored):
    """OpenAI's newer request for an answer. The server keeps nothing between two of them."""

    model: Name
    input: (
        Annotated[Text, Field(min_length=1)]
        | Annotated[list[InputMessage | ReasoningItem], Field(min_length=1, max_length=10_000)]
    )
    instructions: Text | None = None
    max_output_tokens: TokenCount | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    text: TextOptions | None = None
    ragcache: Extension | None = None
    reasoning: ReasoningField | None = None
    previous_response_id: Text | None = None
    conversation: JsonValue = None

    parallel_tool_calls: bool | None = None  # accepted, and of no consequence here

    # Accepted only where they ask for nothing.
    background: Literal[False] | None = None
    context_management: Nothing | None = None
    include: Nothing | None = None
    moderation: None = None
    prompt: None = None
    tools: Nothing | None = None
    tool_choice: Literal["none", "auto"] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=0)] | None = None
    truncation: Literal["disabled"] | None = None

    @field_validator("input")
    @classmethod
    def _says_something(
        cls, given: str | list[InputMessage | ReasoningItem]
    ) -> str | list[InputMessage | ReasoningItem]:
        if not any(isinstance(one, str | InputMessage) for one in given):
            raise ValueError("it holds no message")
        return given

    @field_validator("previous_response_id", "conversation")
    @classmethod
    def _keeps_nothing(cls, given: Any) -> None:
        if given is not None:
            raise ValueError("the server keeps no answers; send the whole conversation as 'input'")

    @property
    def extension(self) -> Extension:
        return self.ragcache or Extension()

    def as_chat(self) -> ChatRequest:
        """The same question as a chat."""
        asked = [InputMessage(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        told = [Message(role="system", content=self.instructions)] if self.instructions else []
        form = self.text.format if self.text is not None else None
        return ChatRequest(
            model=self.model,
            messages=[*told, *(one.as_message() for one in asked if isinstance(one, InputMessage))],
            max_completion_tokens=self.max_output_tokens,
            reasoning_effort=self.reasoning.effort if self.reasoning else None,
            temperature=self.temperature,
            top_p=self.top_p,
            stream=self.stream,
            response_format=form.as_format() if isinstance(form, FlatSchemaFormat) else form,
            ragcache=self.ragcache,
        )


class OutputText(AnswerModel):
    type: Literal["output_text"]
    text: str
    annotations: list[dict[str, JsonValue]]
    logprobs: list[JsonValue]


class OutputMessage(AnswerModel):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    status: Literal["in_progress", "completed", "incomplete"]
    content: list[OutputText]


class InputTokensDetails(AnswerModel):
    cached_tokens: int


class OutputTokensDetails(AnswerModel):
    reasoning_tokens: int


class ResponseUsage(AnswerModel):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(AnswerModel):
    reason: Literal["max_output_tokens"]


class ResponseObject(AnswerModel):
    """An answer. status: incomplete for one that reached its longest length"""

    id: str
    object: Literal["response"]
    created_at: int
    model: str
    status: Literal["in_progress", "completed", "incomplete"]
    error: None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    output: list[OutputMessage]
    parallel_tool_calls: bool
    previous_response_id: None
    temperature: float
    top_p: float
    tool_choice: Literal["none", "auto"]
    tools: list[JsonValue]
    metadata: dict[str, Any]
    usage: ResponseUsage | None
    ragcache: ChatExtension = ChatExtension()


class ResponseEvent(AnswerModel):
    """One event of a stream; its type says which of the fields it has."""

    type: str
    sequence_number: int
    response: ResponseObject | None = None
    item: OutputMessage | None = None
    part: OutputText | None = None
    item_id: str | None = None
    output_index: int | None = None
    content_index: int | None = None
    delta: str | None = None
    text: str | None = None
    annotation: dict[str, JsonValue] | None = None
    annotation_index: int | None = None
    logprobs: list[JsonValue] = Field(default_factory=list)
    code: str | None = None
    message: str | None = None
    param: str | None = None


router = APIRouter(tags=["answers"])
Status = Literal["in_progress", "completed", "incomplete"]


@router.post(
    "/v1/responses",
    summary="Answer the last user message, in the shapes of OpenAI's newer API",
    responses={
        200: streamed(ResponseObject, "The answer; with stream: true, events", ResponseEvent),
        **errors(400, 404, 409, 413, 415, 503, 504),
    },
    openapi_extra=request_body(json=ResponsesRequest),
)
async def create_response(request: Request) -> Response:
    service = service_of(request)
    asked = await read_json(request, ResponsesRequest)
    retrieves, chat = service.retrieves(asked.model), asked.as_chat()
    call = engine_call(chat, service.settings.answers, service.kb.lm.max_positions, retrieves=retrieves)
    writer = ResponseWriter(service, request, asked.model, asked=asked, sampling=call.options["sampling"])
    events = service.kb.astream_chat(call.messages, **call.options)
    return await respond(writer, chat, [events], asked.extension.timeout_s)


@dataclass
class ResponseWriter(Writer):
    """Writes one answer in the shapes of OpenAI's newer API. item: id of its message; numbers: of its events"""

    id: str = field(default_factory=lambda: f"resp_{uuid.uuid4().hex}")
    item: str = field(default_factory=lambda: f"msg_{uuid.uuid4().hex}")
    numbers: Iterator[int] = field(default_factory=count)
    asked: ResponsesRequest = field(kw_only=True)
    sampling: Sampling = field(kw_only=True)

    def completion(self, answers: Sequence[Answer]) -> AnswerModel:
        return self.whole(answers[0])

    async def chunks(self, first: Event, works: Sequence[RunningTask[Event]], *, usage: bool) -> AsyncIterator[bytes]:
        """The stream."""
        found = ChatExtension(sources=sources_of(first.hits if isinstance(first, Sources) else []))
        for name in ("response.created", "response.in_progress"):
            yield self.say(name, response=self.response("in_progress", [], None, found))
        yield self.say("response.output_item.added", output_index=0, item=self.message("in_progress", []))
        yield self.say("response.content_part.added", **self._place(), part=_part(""))
        async for _, one in merged(works):
            if isinstance(one, Token) and one.text:
                yield self.say("response.output_text.delta", **self._place(), delta=one.text, logprobs=[])
            elif isinstance(one, Done):
                whole = self.whole(one.answer)
                part = whole.output[0].content[0]
                for rank, cited in enumerate(part.annotations):
                    place = {**self._place(), "annotation_index": rank}
                    yield self.say("response.output_text.annotation.added", **place, annotation=cited)
                yield self.say("response.output_text.done", **self._place(), text=part.text, logprobs=[])
                yield self.say("response.content_part.done", **self._place(), part=part)
                yield self.say("response.output_item.done", output_index=0, item=whole.output[0])
                yield self.say(f"response.{whole.status}", response=whole)

    def failed(self, error: Exception) -> bytes:
        problem = self.problem(error)
        return self.say("error", code=problem.code, message=problem.body().error.message, param=problem.param)

    def say(self, type: str, **fields: Any) -> bytes:
        """The next event."""
        return event(ResponseEvent(type=type, sequence_number=next(self.numbers), **fields).to_json(), type)

    def whole(self, answer: Answer) -> ResponseObject:
        status: Status = "completed" if answer.finish_reason == "stop" else "incomplete"
        costs = ChatExtension(sources=sources_of(answer.hits), **self.costs(answer))
        return self.response(
            status, [self.message(status, [_part(answer.text, citations(answer))])], _usage(answer), costs
        )

    def response(
        self, status: Status, output: list[OutputMessage], usage: ResponseUsage | None, costs: ChatExtension
    ) -> ResponseObject:
        return ResponseObject(
            id=self.id,
            object="response",
            created_at=self.created,
            model=self.model,
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


def _part(text: str, cited: Sequence[dict[str, JsonValue]] = ()) -> OutputText:
    return OutputText(type="output_text", text=text, annotations=list(cited), logprobs=[])


def _usage(answer: Answer) -> ResponseUsage:
    usage = answer.usage
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputTokensDetails(cached_tokens=usage.cached_tokens),
        output_tokens=usage.completion_tokens,
        output_tokens_details=OutputTokensDetails(reasoning_tokens=usage.reasoning_tokens),
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
    )
