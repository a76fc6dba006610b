"""Bodies of POST /v1/responses."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, field_validator

from ragcache.server.schemas.base import AnswerModel, JsonObject, Name, RequestModel, Text
from ragcache.server.schemas.chat import (
    ChatRequest,
    Extension,
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
from ragcache.server.schemas.completion import ChatExtension


class InputPart(BaseModel):
    """A part of a message. Only text can be read; parts of answers come back as they were given out."""

    model_config = ConfigDict(strict=True, extra="allow")

    type: Literal["input_text", "output_text"]
    text: Text


class InputMessage(BaseModel):
    """A turn; an answer may be sent back as it came."""

    model_config = ConfigDict(strict=True, extra="allow")

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Text | list[InputPart]

    def as_message(self) -> Message:
        if isinstance(self.content, str):
            return Message(role=self.role, content=self.content)
        return Message(role=self.role, content=[TextPart(type="text", text=part.text) for part in self.content])


class FlatSchemaFormat(JsonSchema):
    type: Literal["json_schema"]

    def as_format(self) -> SchemaFormat:
        schema = JsonSchema(name=self.name, schema=self.schema_)
        return SchemaFormat(type="json_schema", json_schema=schema)


class TextOptions(RequestModel):
    format: Annotated[PlainFormat | JsonFormat | FlatSchemaFormat, Field(discriminator="type")] | None = None
    verbosity: None = None


class ResponsesRequest(RequestModel):
    """OpenAI's newer request for an answer. The server keeps nothing between two of them."""

    model: Name
    input: Annotated[Text, Field(min_length=1)] | Annotated[list[InputMessage], Field(min_length=1, max_length=10_000)]
    instructions: Text | None = None
    max_output_tokens: TokenCount | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    text: TextOptions | None = None
    ragcache: Extension | None = None
    previous_response_id: Text | None = None
    conversation: JsonValue = None

    # Accepted, and of no consequence here.
    user: Text | None = None
    metadata: JsonObject | None = None
    store: bool | None = None
    service_tier: Text | None = None
    parallel_tool_calls: bool | None = None
    prompt_cache_key: Text | None = None
    prompt_cache_retention: Text | None = None
    safety_identifier: Text | None = None

    # Accepted only where they ask for nothing.
    background: Literal[False] | None = None
    include: Nothing | None = None
    prompt: None = None
    reasoning: None = None
    tools: Nothing | None = None
    tool_choice: Literal["none", "auto"] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=0)] | None = None
    truncation: Literal["disabled"] | None = None

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
            messages=[*told, *(message.as_message() for message in asked)],
            max_completion_tokens=self.max_output_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            stream=self.stream,
            response_format=form.as_format() if isinstance(form, FlatSchemaFormat) else form,
            ragcache=self.ragcache,
        )


class OutputText(AnswerModel):
    type: Literal["output_text"]
    text: str
    annotations: list[JsonValue]
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
    logprobs: list[JsonValue] = Field(default_factory=list)
    code: str | None = None
    message: str | None = None
    param: str | None = None
