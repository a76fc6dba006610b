"""Bodies of POST /v1/chat/completions and its responses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from pydantic import (
    BeforeValidator,
    Field,
    JsonValue,
    StringConstraints,
    ValidationInfo,
    create_model,
    field_validator,
    model_validator,
)

from ragcache.engine.options import AnswerDefaults, GenerationOptions, RetrieveOptions, names
from ragcache.models.sampler import MAX_LOGPROBS
from ragcache.models.thoughts import Effort
from ragcache.server.wire import AnswerModel, JsonObject, LooseModel, Name, RequestModel, Text

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

# Features that would change an answer and that this server lacks: refused by name unless they are disabled.
UNSUPPORTED = {
    "audio", "background", "best_of", "context_management", "conversation", "echo", "function_call", "functions",
    "include", "modalities", "moderation", "suffix", "tool_choice", "tools", "truncation", "verbosity",
    "web_search_options",
}  # fmt: skip

# Types of message parts that hold a model's reasoning.
THOUGHTS = ("thinking", "redacted_thinking", "reasoning")
CONTINUED = "the last message is continued where it is an assistant's, and there alone; leave it out"


class TextPart(LooseModel):
    """A part of a message. Only text can be read."""

    type: Literal["text"]
    text: Text


def _without_thoughts(content: Any) -> Any:
    """Drop parts with reasoning, which clients send back with an answer; chat templates leave it out."""
    if not isinstance(content, list):
        return content
    return [part for part in content if not (isinstance(part, dict) and part.get("type") in THOUGHTS)]


class CalledFunction(LooseModel):
    """The function of an earlier call. arguments: JSON, as the model wrote it"""

    name: Text
    arguments: Text


class Called(LooseModel):
    """A tool call of an earlier answer, which the client sends back."""

    id: Name
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(LooseModel):
    """A turn. `developer` is read as `system`. Unknown fields are ignored, because clients send answers back whole.

    tool_call_id: in a message of role `tool`, the id of the call whose result the message holds
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[Text | list[TextPart] | None, BeforeValidator(_without_thoughts)] = None
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


def optional(*names: str) -> type[RequestModel]:
    """Return a model with the named answer options, all optional, and their help as descriptions."""
    made: dict[str, Any] = {}
    for name, hint in get_type_hints(AnswerDefaults, include_extras=True).items():
        if name in names:
            kind, option = get_args(hint)
            kind = JsonObject if any(get_origin(part) is Mapping for part in get_args(kind)) else kind
            made[name] = (kind | None, Field(default=None, description=option.help, ge=option.least, le=option.most))
    return create_model("Options", __base__=RequestModel, **made)


class RetrieveFields(optional("k", *names(RetrieveOptions))):  # type: ignore[misc]
    """Options that decide which passages are found."""

    collection: Name | None = Field(default=None, description="The only one seen; else all that the key reads")


class TemplateFields(optional("chat_template_kwargs")):  # type: ignore[misc]
    """Inputs of the chat template, under the names of OpenAI and vLLM."""

    reasoning_effort: Effort | None = Field(default=None, description="How much the model thinks; none: not at all")


class ReadFields(TemplateFields, optional("top_k", *names(GenerationOptions))):  # type: ignore[misc]
    """Options that decide how a prompt is read and answered."""

    method: Name | None = Field(default=None, description="Fusion method; see GET /v1/methods")
    method_options: JsonObject | None = Field(default=None, description='Of the method, such as {"ratio": 0.15}')
    timeout_s: Annotated[float, Field(gt=0)] | None = Field(
        default=None, description="Seconds for the whole answer, waiting included; the server's own limit holds too"
    )


class Extension(RetrieveFields, ReadFields, optional("context", "drop_turns")):  # type: ignore[misc]
    """Options that OpenAI's API has no place for. In the openai client: `extra_body={"ragcache": {...}}`."""

    retrieve: bool | None = Field(default=None, description="false: answer without passages")
    documents: Annotated[list[GivenDocument], Field(max_length=1000)] | None = None  # to read instead of retrieving
    tool_format: Name | None = Field(
        default=None, description="How the model writes calls, if its template does not say"
    )


class ToolFunction(RequestModel):
    """A function that the model may call.

    parameters: a JSON schema of the arguments
    strict: ignored: arguments fit the schema if `tool_choice` requires a call, and are not constrained otherwise
    """

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
    """A JSON schema for the answer. `strict` is ignored: the answer always fits the schema."""

    name: Name
    description: Text | None = None
    schema_: JsonObject = Field(alias="schema")
    strict: bool | None = None


class SchemaFormat(RequestModel):
    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[PlainFormat | JsonFormat | SchemaFormat, Field(discriminator="type")]


class Ignored(RequestModel):
    """Fields of OpenAI's requests for an answer that are accepted and ignored."""

    user: Text | None = None
    metadata: JsonObject | None = None
    store: bool | None = None
    service_tier: Text | None = None
    prompt_cache_key: Text | None = None
    prompt_cache_options: JsonObject | None = None
    prompt_cache_retention: Text | None = None
    safety_identifier: Text | None = None


class SampledRequest(RequestModel):
    """Fields that chat completions and completions share, with vLLM's additions: top_k, min_p, repetition_penalty,
    stop_token_ids.

    logit_bias: biases by token id, which is a string because JSON has no other keys
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

    ragcache: ReadFields | None = None

    # Accepted and ignored.
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

    @property
    def likeliest(self) -> int | None:
        """Return the value for `Sampling.logprobs`."""
        raise NotImplementedError

    @property
    def extension(self) -> ReadFields:
        return self.ragcache or ReadFields()


class ChatRequest(SampledRequest, TemplateFields, Ignored):
    """OpenAI's request for a chat completion. Unsupported features that would change the answer are refused by name."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=10_000)]
    max_completion_tokens: TokenCount | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: Annotated[bool, Field(description="false: one call at most")] | None = None
    logprobs: bool | None = None
    top_logprobs: LikeliestCount | None = None
    ragcache: Extension | None = None

    # vLLM's fields. The messages decide this already: an answer continues the last message if it is an assistant's.
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None

    # Accepted and ignored.
    prediction: JsonObject | None = None

    # Features that this server lacks: only values that disable them are accepted.
    functions: Nothing | None = None
    function_call: Literal["none", "auto"] | None = None
    modalities: list[Literal["text"]] | None = None
    audio: None = None
    moderation: None = None
    verbosity: None = None
    web_search_options: None = None

    @field_validator("top_logprobs")
    @classmethod
    def _go_with_logprobs(cls, count: int | None, given: ValidationInfo) -> int | None:
        if count and not given.data.get("logprobs"):
            raise ValueError("it goes with logprobs: true")
        return count

    @model_validator(mode="after")
    def _says_what_is_done(self) -> ChatRequest:
        last = self.messages[-1]
        continued = last.role == "assistant" and not last.tool_calls
        if self.continue_final_message is not None and self.continue_final_message != continued:
            raise ValueError(f"continue_final_message is {self.continue_final_message}, and {CONTINUED}")
        if self.add_generation_prompt is not None and self.add_generation_prompt == continued:
            raise ValueError(f"add_generation_prompt is {self.add_generation_prompt}, and {CONTINUED}")
        return self

    @property
    def likeliest(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def extension(self) -> Extension:
        return self.ragcache or Extension()


class SourceItem(AnswerModel):
    """A passage that the answer was read from."""

    chunk_id: str
    document_id: str
    title: str
    source: str
    place: str = Field(description='Where in its document the passage is: "p. 3", "slide 2"; empty if unknown')
    text: str
    metadata: dict[str, Any]
    tokens: int
    score: float
    handle: str | None
    kv: str = Field(description="memory, disk, computed (now), or unused (full prefill reads the text)")


class PhaseSeconds(AnswerModel):
    """Seconds by phase, and from the request's arrival to the first and the last token."""

    queue_s: float = Field(description="Waiting for a slot and for memory, from the request's arrival")
    retrieve_s: float
    load_s: float
    encode_s: float
    place_s: float
    prefill_s: float
    ttft_s: float
    total_s: float


class ReasonItem(AnswerModel):
    """Why a passage was, or was not, read from stored KV; see `ragcache why`."""

    passage: str = Field(description="Its id; for text without an id, how it begins")
    why: Literal["found", "never stored", "evicted", "another model", "differs", "method cannot"]
    detail: str
    place: int = Field(description="Number of the passage's first token that differs; -1: none")


class ChatExtension(AnswerModel):
    """The passages, and the cost of the answer: counts of tokens, then measured times, then an estimate."""

    sources: list[SourceItem] = Field(default_factory=list)
    prompt_tokens: int = Field(default=0, description="Tokens of the prompt")
    computed_tokens: int = Field(
        default=0, description="Of them, tokens that the model ran for this question, mean over its layers"
    )
    created_tokens: int = Field(
        default=0, description="Of them, tokens whose KV was in no tier and was encoded for this question"
    )
    avoided_tokens: int = Field(
        default=0, description="The rest: tokens whose KV was loaded, in proportion to the layers that did not run them"
    )
    method: str = Field(
        default="", description="The fusion method that read the prompt, with the options that differ from its own"
    )
    method_reason: str = Field(default="", description="Why this one, and what to do next")
    dropped: int = Field(default=0, description="Passages that did not fit the context")
    dropped_turns: int = Field(default=0, description="Oldest messages that did not fit the context")
    timings: PhaseSeconds | None = None
    full_prefill_estimate_s: float | None = Field(
        default=None,
        description="What reading the whole prompt would take here, by the fastest of what this server has read in "
        "full; null where it has read nothing yet. Rather too low for prompts longer than that",
    )
    full_prefill_samples: int = Field(default=0, description="Reads that the estimate was learnt from")
    reasons: list[ReasonItem] = Field(default_factory=list, description="For each passage; with explain=1 alone")


class PromptTokensDetails(AnswerModel):
    cached_tokens: int
    audio_tokens: int = 0


class CompletionTokensDetails(AnswerModel):
    reasoning_tokens: int = 0
    audio_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


class ChatUsage(AnswerModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class FunctionCall(AnswerModel):
    """The function of a call. arguments: JSON, or the model's text if that is not JSON"""

    name: str
    arguments: str


class MessageCall(AnswerModel):
    id: str
    type: Literal["function"]
    function: FunctionCall


class DeltaCall(MessageCall):
    """A tool call in a stream, which is sent whole. index: its number within the answer, from 0"""

    index: int


class AnswerMessage(AnswerModel):
    """The message of an answer.

    content: null if the answer has only tool calls
    reasoning_content: the model's reasoning, under vLLM's name
    """

    role: Literal["assistant"]
    content: str | None
    reasoning_content: str = ""
    tool_calls: list[MessageCall] = Field(default_factory=list)
    refusal: None
    annotations: list[JsonValue]


class LikelyToken(AnswerModel):
    """A token and its log-probability. bytes: its UTF-8 bytes; null if it is part of a character"""

    token: str
    logprob: float
    bytes: list[int] | None


class ScoredToken(LikelyToken):
    top_logprobs: list[LikelyToken]


class ChoiceLogprobs(AnswerModel):
    """Log-probabilities of the answer's tokens by the model, before temperature, top-k, top-p and penalties."""

    content: list[ScoredToken]
    refusal: None


class Choice(AnswerModel):
    index: int
    message: AnswerMessage
    logprobs: ChoiceLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class ChatCompletion(AnswerModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[Choice]
    usage: ChatUsage
    ragcache: ChatExtension


class Delta(AnswerModel):
    role: Literal["assistant"] = "assistant"
    content: str = ""
    reasoning_content: str = ""
    tool_calls: list[DeltaCall] = Field(default_factory=list)
    refusal: None = None
    annotations: list[JsonValue] = Field(default_factory=list, description="With the finish reason: the pages cited")


class ChunkChoice(AnswerModel):
    index: int
    delta: Delta
    logprobs: ChoiceLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"] | None


class ChatCompletionChunk(AnswerModel):
    """An event of a stream. The first event has the sources, and the event with a finish reason has the costs.

    event: the sources in the form of Open WebUI; see `source_event`
    """

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChunkChoice]
    usage: ChatUsage | None = None
    ragcache: ChatExtension = ChatExtension()
    event: dict[str, Any] = Field(default_factory=dict)
