"""Bodies of Anthropic's Messages API and its responses. Features that the server lacks are refused by name."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import (
    BeforeValidator,
    Field,
    JsonValue,
    StringConstraints,
    model_validator,
)

from ragcache.server.body import checked
from ragcache.server.chat_types import (
    MAX_TOOLS,
    Called,
    CalledFunction,
    ChatExtension,
    ChatRequest,
    Extension,
    JsonSchema,
    Message,
    NamedFunction,
    NamedTool,
    Nothing,
    SchemaFormat,
    StopText,
    TokenCount,
    Tool,
    ToolFunction,
)
from ragcache.server.wire import AnswerModel, JsonObject, LooseModel, Name, RequestModel, Text

MOST_POINTS = 4
"""Most cache points of one request, as in Anthropic's own API."""
TTLS = {"5m": 300.0, "1h": 3600.0}


def _no_media(given: Any) -> Any:
    kind = given.get("type") if isinstance(given, dict) else None
    if kind in ("image", "container_upload"):
        raise ValueError(f"the model reads no blocks of type {kind!r}; send text alone")
    source = given.get("source") if isinstance(given, dict) and kind == "document" else None
    if isinstance(source, dict) and source.get("type") not in ("text", "content"):
        raise ValueError("a document's source is text here; POST /v1/documents reads files")
    return given


class CacheControl(RequestModel):
    """Protects the KV of everything up to its block from eviction. ttl: for how long after the last use"""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] = "5m"


class Block(LooseModel):
    cache_control: CacheControl | None = None

    @property
    def read(self) -> str:
        """Return the block's text in the prompt."""
        return ""


class TextBlock(Block):
    type: Literal["text"]
    text: Text

    @model_validator(mode="after")
    def _has_text_to_pin(self) -> TextBlock:
        if self.cache_control and not self.text.strip():
            raise ValueError("cache_control is of an empty text, of which there is nothing to pin; leave it out")
        return self

    @property
    def read(self) -> str:
        return self.text


class TextSource(LooseModel):
    type: Literal["text"]
    data: Text

    @property
    def read(self) -> str:
        return self.data


class ContentSource(LooseModel):
    type: Literal["content"]
    content: Text | list[TextBlock]

    @property
    def read(self) -> str:
        return _joined(self.content)


class DocumentBlock(Block):
    """A document as text, which the model reads at this place."""

    type: Literal["document"]
    source: Annotated[TextSource | ContentSource, Field(discriminator="type")]
    title: Text | None = None
    context: Text | None = None

    @property
    def read(self) -> str:
        return "\n".join([part for part in (self.title, self.context) if part] + [f"{self.source.read.rstrip()}\n\n"])


class SearchResultBlock(Block):
    type: Literal["search_result"]
    source: Text
    title: Text
    content: list[TextBlock]

    @property
    def read(self) -> str:
        return f"{self.title}\n{self.source}\n{_joined(self.content).rstrip()}\n\n"


ResultBlock = Annotated[
    Annotated[TextBlock | DocumentBlock | SearchResultBlock, Field(discriminator="type")], BeforeValidator(_no_media)
]


class ToolResultBlock(Block):
    type: Literal["tool_result"]
    tool_use_id: Name
    content: Text | list[ResultBlock] | None = None
    is_error: bool | None = None

    @property
    def read(self) -> str:
        return ("Error: " if self.is_error else "") + _joined(self.content or "")


class ToolUseBlock(Block):
    type: Literal["tool_use"]
    id: Name
    name: Text
    input: JsonObject = Field(default_factory=dict)


class ThinkingBlock(Block):
    """Reasoning of an earlier turn, which chat templates leave out."""

    type: Literal["thinking", "redacted_thinking"]
    cache_control: None = Field(default=None, description="Thoughts are not read again, and so cannot be pinned")


ContentBlock = Annotated[
    Annotated[
        TextBlock | DocumentBlock | SearchResultBlock | ToolResultBlock | ToolUseBlock | ThinkingBlock,
        Field(discriminator="type"),
    ],
    BeforeValidator(_no_media),
]


def _joined(content: str | Sequence[Block]) -> str:
    return content if isinstance(content, str) else "".join(block.read for block in content)


class MessageParam(LooseModel):
    role: Literal["user", "assistant"]
    content: Text | list[ContentBlock]

    @model_validator(mode="after")
    def _has_blocks_of_its_role(self) -> MessageParam:
        kinds = {"user": (ToolUseBlock, ThinkingBlock), "assistant": (ToolResultBlock,)}[self.role]
        wrong = next((one for one in self.blocks if isinstance(one, kinds)), None)
        if wrong is not None:
            raise ValueError(f"a message of role {self.role!r} has no blocks of type {wrong.type!r}")
        return self

    @property
    def blocks(self) -> Sequence[Any]:
        return [TextBlock(type="text", text=self.content)] if isinstance(self.content, str) else self.content

    def messages(self, most: int | None = None) -> list[Message]:
        """Return the turn in OpenAI's form, in which each tool's result is a separate message.

        most: number of the turn's first blocks to read; None: all
        """
        blocks = self.blocks[:most]
        results = [one for one in blocks if isinstance(one, ToolResultBlock)]
        found = [checked(Message, role="tool", content=one.read, tool_call_id=one.tool_use_id) for one in results]
        calls = [
            Called(id=one.id, function=CalledFunction(name=one.name, arguments=json.dumps(one.input)))
            for one in blocks
            if isinstance(one, ToolUseBlock)
        ]
        text = _joined([one for one in blocks if not isinstance(one, ToolResultBlock)])
        if text or not results:
            found.append(checked(Message, role=self.role, content=text, **({"tool_calls": calls} if calls else {})))
        return found


class AnthropicTool(RequestModel):
    """A tool that the client runs. Tools that Anthropic runs have another type, and are refused."""

    type: Literal["custom"] | None = None
    name: Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
    description: Text | None = None
    input_schema: JsonObject
    strict: bool | None = None
    cache_control: CacheControl | None = None

    # Accepted, without effect.
    eager_input_streaming: bool | None = None
    input_examples: list[JsonObject] | None = None


class ToolChoice(RequestModel):
    type: Literal["auto", "any", "none", "tool"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _names_its_tool(self) -> ToolChoice:
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("name goes with type 'tool', and there alone")
        return self

    @property
    def chosen(self) -> str | NamedTool:
        if self.name is not None:
            return NamedTool(type="function", function=NamedFunction(name=self.name))
        return {"any": "required"}.get(self.type, self.type)


class ThinkingOptions(RequestModel):
    """Whether the model thinks. budget_tokens: most tokens of reasoning. display: "omitted" leaves its text out"""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(RequestModel):
    type: Literal["json_schema"]
    schema_: JsonObject = Field(alias="schema")


class OutputConfig(RequestModel):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class CountRequest(RequestModel):
    """A prompt. cache_control: has the effect of a cache_control of the prompt's last block"""

    model: Name
    messages: Annotated[list[MessageParam], Field(min_length=1, max_length=10_000)]
    system: Text | list[TextBlock] | None = None
    tools: Annotated[list[AnthropicTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingOptions | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None
    ragcache: Extension | None = None

    # Accepted only if empty.
    mcp_servers: Nothing | None = None
    context_management: None = None
    container: None = None

    @model_validator(mode="after")
    def _has_few_points(self) -> CountRequest:
        count = sum(1 for _ in self.points)
        if count > MOST_POINTS:
            raise ValueError(f"cache_control is of {count} blocks; a request has at most {MOST_POINTS}")
        return self

    @property
    def extension(self) -> Extension:
        return self.ragcache or Extension()

    @property
    def standing(self) -> list[Message]:
        """Return the system message, if there is any."""
        text = self.system if isinstance(self.system, str) else "\n\n".join(block.read for block in self.system or ())
        return [checked(Message, role="system", content=text)] if text else []

    @property
    def points(self) -> Iterator[Point]:
        """Yield the cache points. Tools and system prompt are read together, so a cache point in either covers both."""
        system = () if self.system is None or isinstance(self.system, str) else self.system
        ttls = [one.cache_control.ttl for one in (*(self.tools or ()), *system) if one.cache_control]
        yield from (Point(0, 0, TTLS[ttl]) for ttl in ttls)
        for rank, turn in enumerate(self.messages):
            for number, block in enumerate(turn.blocks):
                if block.cache_control:
                    yield Point(rank, number + 1, TTLS[block.cache_control.ttl])
        if self.cache_control:
            yield Point(len(self.messages) - 1, len(self.messages[-1].blocks), TTLS[self.cache_control.ttl])

    def head(self, point: Point) -> list[Message]:
        """Return the messages up to a cache point; after a system prompt alone, a placeholder of a user message."""
        if not point.blocks:
            return [*self.standing, Message(role="user", content=".")]
        before = [message for turn in self.messages[: point.turn] for message in turn.messages()]
        return [*self.standing, *before, *self.messages[point.turn].messages(point.blocks)]

    def as_chat(self, *, thinks: bool, **more: Any) -> ChatRequest:
        """Return the request in OpenAI's form. thinks: whether the model can think. Raises ApiError."""
        extension, thinking, output = self.extension, self.thinking, self.output_config or OutputConfig()
        if thinking and (thinks or thinking.type == "enabled"):
            told = {"enable_thinking": thinking.type != "disabled", "thinking_budget": thinking.budget_tokens}
            extension = extension.model_copy(update=told)
        form = output.format and SchemaFormat(
            type="json_schema",
            json_schema=JsonSchema.model_validate({"name": "output", "schema": output.format.schema_}),
        )
        tools = [
            Tool(
                type="function",
                function=ToolFunction(name=one.name, description=one.description, parameters=one.input_schema),
            )
            for one in self.tools or ()
        ]
        return checked(
            ChatRequest,
            model=self.model,
            messages=[*self.standing, *(message for turn in self.messages for message in turn.messages())],
            tools=tools or None,
            tool_choice=self.tool_choice and self.tool_choice.chosen,
            parallel_tool_calls=not (self.tool_choice and self.tool_choice.disable_parallel_tool_use),
            response_format=form or None,
            reasoning_effort={"max": "xhigh"}.get(output.effort, output.effort) if output.effort and thinks else None,
            ragcache=extension,
            **more,
        )


class Point(NamedTuple):
    """A cache point: after the first `blocks` blocks of turn number `turn`; 0 blocks: after tools and system prompt."""

    turn: int
    blocks: int
    ttl_s: float


class Metadata(RequestModel):
    user_id: Text | None = None


class MessagesRequest(CountRequest):
    max_tokens: TokenCount
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    stop_sequences: Annotated[list[StopText], Field(max_length=16)] | None = None

    # Accepted, without effect.
    metadata: Metadata | None = None
    service_tier: Text | None = None
    inference_geo: Text | None = None
    speed: Literal["standard"] | None = None

    def chat(self, *, thinks: bool) -> ChatRequest:
        same = {name: getattr(self, name) for name in ("stream", "max_tokens", "temperature", "top_p", "top_k")}
        return self.as_chat(thinks=thinks, stop=self.stop_sequences, **same)


class ErrorInfo(AnswerModel):
    type: str
    message: str = Field(description="What is wrong and how to get out of it")


class AnthropicError(AnswerModel):
    type: Literal["error"]
    error: ErrorInfo


class MessageUsage(AnswerModel):
    """Usage of tokens. The first three fields add up to the prompt's tokens."""

    input_tokens: int = Field(description="Tokens that ran for this request and are not kept by a cache point")
    cache_creation_input_tokens: int = Field(description="Tokens that ran and whose KV is kept")
    cache_read_input_tokens: int = Field(description="Tokens whose KV was loaded")
    output_tokens: int


class AnswerBlock(AnswerModel):
    """A block of an answer; its type says which of the fields it has."""

    type: Literal["text", "thinking", "tool_use"]
    text: str = ""
    citations: None = None
    thinking: str = ""
    signature: str = ""
    id: str = ""
    name: str = ""
    input: dict[str, JsonValue] = Field(default_factory=dict)


StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class AnthropicMessage(AnswerModel):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[AnswerBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage
    ragcache: ChatExtension = ChatExtension()


class BlockDelta(AnswerModel):
    type: Literal["text_delta", "thinking_delta", "signature_delta", "input_json_delta"]
    text: str = ""
    thinking: str = ""
    signature: str = ""
    partial_json: str = ""


class MessageEnd(AnswerModel):
    stop_reason: StopReason
    stop_sequence: str | None


class MessageEvent(AnswerModel):
    """An event of a stream; its type says which of the fields it has."""

    type: str
    message: AnthropicMessage | None = None
    index: int = 0
    content_block: AnswerBlock | None = None
    delta: BlockDelta | MessageEnd | None = None
    usage: MessageUsage | None = None
    ragcache: ChatExtension = ChatExtension()


class TokenTotal(AnswerModel):
    input_tokens: int
