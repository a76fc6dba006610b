"""The body of POST /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    StringConstraints,
    ValidationInfo,
    field_validator,
    model_validator,
)

from ragcache.engine.options import Context, Order, Overflow
from ragcache.models.sampler import MAX_LOGPROBS
from ragcache.retrieval.search import Search
from ragcache.server.schemas.base import JsonObject, Name, RequestModel, Text

SeedInt = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
TokenCount = Annotated[int, Field(ge=1, le=2**31 - 1)]
StopText = Annotated[Text, Field(min_length=1)]
Nothing = Annotated[list[JsonValue], Field(max_length=0)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
LikeliestCount = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]
DecimalId = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,9}$")]
Bias = Annotated[float, Field(ge=-100, le=100)]
MAX_TOOLS = 128
MAX_ANSWERS = 128
"""Most tools, and most answers (`n`), of one request, as in OpenAI's own API."""

# Features that change an answer and that this server does not have: refused by name unless they ask for nothing.
UNSUPPORTED = {
    "audio", "background", "best_of", "echo", "function_call", "functions", "include", "modalities", "moderation",
    "reasoning", "reasoning_effort", "suffix", "tool_choice", "tools", "truncation", "verbosity", "web_search_options",
}  # fmt: skip


class TextPart(BaseModel):
    """A part of a message. Only text can be read."""

    model_config = ConfigDict(strict=True, extra="allow")

    type: Literal["text"]
    text: Text


class CalledFunction(BaseModel):
    """arguments: JSON, as the model wrote it"""

    model_config = ConfigDict(strict=True, extra="allow")

    name: Text
    arguments: Text


class Called(BaseModel):
    """A call of an earlier answer."""

    model_config = ConfigDict(strict=True, extra="allow")

    id: Name
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(BaseModel):
    """A turn. `developer` is read as `system`. Clients send answers back as they came: other fields are left alone.

    tool_call_id: of the call whose result a message of role `tool` holds
    """

    model_config = ConfigDict(strict=True, extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | list[TextPart] | None = None
    tool_calls: list[Called] | None = None
    tool_call_id: Name | None = None
    function_call: None = None
    audio: None = None

    @model_validator(mode="after")
    def _has_content(self) -> Message:
        if self.content is None and self.role != "assistant":
            raise ValueError(f"a message of role {self.role!r} needs content")
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"a message of role {self.role!r} has no tool_calls; those are of role 'assistant'")
        if (self.role == "tool") != (self.tool_call_id is not None):
            raise ValueError("tool_call_id says which call a message of role 'tool' answers; give it there alone")
        return self

    @property
    def text(self) -> str:
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""


class GivenDocument(RequestModel):
    """A passage to answer from. Without text, `id` or `handle` has to name a stored passage."""

    text: Text = ""
    id: Name | None = None
    handle: Name | None = None
    score: float | None = None
    metadata: JsonObject = Field(default_factory=dict)

    @model_validator(mode="after")
    def _names_something(self) -> GivenDocument:
        if not self.text.strip() and self.id is None and self.handle is None:
            raise ValueError("give it a text, or the id or handle of a stored passage")
        return self


class RetrieveFields(RequestModel):
    """Which passages are found."""

    k: Annotated[int, Field(ge=1, le=1000)] | None = Field(default=None, description="Passages to retrieve")
    search: Search | None = Field(default=None, description="By embedding, by the question's words, or by both")
    filter: JsonObject | None = Field(default=None, description='Of metadata, such as {"year": {"$gte": 2020}}')
    score_threshold: float | None = Field(default=None, description="Leave out passages with a lower score")
    mmr_lambda: Annotated[float, Field(ge=0, le=1)] | None = Field(default=None, description="Choose for variety too")
    fetch_k: Annotated[int, Field(ge=1, le=10_000)] | None = Field(
        default=None, description="Candidates that mmr_lambda or the reranker chooses from; 5 * k if absent"
    )
    rerank: bool | None = Field(default=None, description="Whether the server's reranker, if it has one, orders them")


class ReadFields(RequestModel):
    """How a prompt is read and answered."""

    method: Name | None = Field(default=None, description="Fusion method; see GET /v1/methods")
    method_options: JsonObject | None = Field(default=None, description='Of the method, such as {"ratio": 0.15}')
    order: Order | None = Field(
        default=None, description="shared: passages as method full finds most of them read already"
    )
    hint: bool | None = Field(default=None, description="With order shared: say which passages rank first")
    on_overflow: Overflow | None = Field(default=None, description="Passages that do not fit")
    top_k: TokenCount | None = Field(default=None, description="Sample among so many tokens")
    evict: TokenCount | None = Field(default=None, description="Passages' tokens to keep after the first token")
    timeout_s: Annotated[float, Field(gt=0)] | None = Field(
        default=None, description="Seconds for the whole answer, waiting included; the server's own limit holds too"
    )


class Extension(RetrieveFields, ReadFields):
    """Options that OpenAI's API has no place for. In the openai client: `extra_body={"ragcache": {...}}`."""

    retrieve: bool | None = Field(default=None, description="false: answer without passages")
    documents: Annotated[list[GivenDocument], Field(max_length=1000)] | None = None  # to read instead of retrieving
    context: Context | None = Field(
        default=None, description="keep: every turn keeps the passages that it was read over"
    )
    tool_format: Name | None = Field(
        default=None, description="How the model writes calls, if its template does not say"
    )


class ToolFunction(RequestModel):
    """parameters: a JSON schema. strict: the arguments hold to it where `tool_choice` requires a call."""

    name: Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
    description: Text | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class Tool(RequestModel):
    type: Literal["function"]
    function: ToolFunction


class NamedFunction(RequestModel):
    name: Name


class NamedTool(RequestModel):
    type: Literal["function"]
    function: NamedFunction


class StreamOptions(RequestModel):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class PlainFormat(RequestModel):
    type: Literal["text"]


class JsonFormat(RequestModel):
    type: Literal["json_object"]


class JsonSchema(RequestModel):
    """strict: the answer always holds to the schema, whatever this says."""

    name: Name
    description: Text | None = None
    schema_: JsonObject = Field(alias="schema")
    strict: bool | None = None


class SchemaFormat(RequestModel):
    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[PlainFormat | JsonFormat | SchemaFormat, Field(discriminator="type")]


class SampledRequest(RequestModel):
    """What both of OpenAI's requests for an answer have, and what vLLM adds: top_k, min_p, repetition_penalty,
    stop_token_ids.

    logit_bias: by token ids, which JSON writes as strings
    """

    model: Name
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: TokenCount | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: SeedInt | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=16)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_ANSWERS, description="Answers, each in a slot of its own")] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    logit_bias: Annotated[dict[DecimalId, Bias], Field(max_length=1024)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=256)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1, description="0 or -1: among all tokens")] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None

    # Accepted, and of no consequence here.
    user: Text | None = None

    @field_validator("stream_options")
    @classmethod
    def _go_with_a_stream(cls, options: StreamOptions | None, given: ValidationInfo) -> StreamOptions | None:
        if options is not None and given.data.get("stream") is not True:
            raise ValueError("they go with stream: true")
        return options

    @property
    def wants_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


class ChatRequest(SampledRequest):
    """OpenAI's request. Features that would change the answer and are not supported are refused by name."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=10_000)]
    max_completion_tokens: TokenCount | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: Annotated[bool, Field(description="false: one call at most")] | None = None
    logprobs: bool | None = None
    top_logprobs: LikeliestCount | None = None
    ragcache: Extension | None = None

    # Accepted, and of no consequence here.
    metadata: JsonObject | None = None
    store: bool | None = None
    service_tier: Text | None = None
    prediction: JsonObject | None = None
    prompt_cache_key: Text | None = None
    prompt_cache_options: JsonObject | None = None
    prompt_cache_retention: Text | None = None
    safety_identifier: Text | None = None

    # Accepted only where they ask for nothing.
    functions: Nothing | None = None
    function_call: Literal["none", "auto"] | None = None
    modalities: list[Literal["text"]] | None = None
    audio: None = None
    moderation: None = None
    reasoning_effort: None = None
    verbosity: None = None
    web_search_options: None = None

    @field_validator("top_logprobs")
    @classmethod
    def _go_with_logprobs(cls, count: int | None, given: ValidationInfo) -> int | None:
        if count and not given.data.get("logprobs"):
            raise ValueError("it goes with logprobs: true")
        return count

    @property
    def likeliest(self) -> int | None:
        """`Sampling.logprobs`."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def extension(self) -> Extension:
        return self.ragcache or Extension()
