"""Answers of POST /v1/chat/completions."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, JsonValue

from ragcache.server.schemas.base import AnswerModel


class SourceItem(AnswerModel):
    """A passage that the answer was read from."""

    chunk_id: str
    document_id: str
    title: str
    source: str
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


class ChatExtension(AnswerModel):
    """The passages and what the answer cost: first what is counted, then what was timed, then what is estimated."""

    sources: list[SourceItem] = Field(default_factory=list)
    prompt_tokens: int = Field(default=0, description="Tokens of the prompt")
    computed_tokens: int = Field(default=0, description="Those of them that the model ran for this question")
    avoided_tokens: int = Field(default=0, description="Those of them whose KV was reused")
    method: str = Field(default="", description="The fusion method that read the prompt")
    method_reason: str = Field(default="", description="Why this one, in a few words")
    dropped: int = Field(default=0, description="Passages that did not fit the context")
    timings: PhaseSeconds | None = None
    full_prefill_estimate_s: float | None = Field(
        default=None,
        description="What reading the whole prompt would take here, by the fastest of what this server has read in "
        "full; null where it has read nothing yet. Rather too low for prompts longer than that",
    )
    full_prefill_samples: int = Field(default=0, description="Reads that the estimate was learnt from")


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
    """arguments: JSON; where the model wrote none, what it did write"""

    name: str
    arguments: str


class MessageCall(AnswerModel):
    id: str
    type: Literal["function"]
    function: FunctionCall


class DeltaCall(MessageCall):
    """A whole call. index: which one of the answer"""

    index: int


class AnswerMessage(AnswerModel):
    """content: null where the answer is calls alone"""

    role: Literal["assistant"]
    content: str | None
    tool_calls: list[MessageCall] = Field(default_factory=list)
    refusal: None
    annotations: list[JsonValue]


class LikelyToken(AnswerModel):
    """bytes: null for a part of a character."""

    token: str
    logprob: float
    bytes: list[int] | None


class ScoredToken(LikelyToken):
    top_logprobs: list[LikelyToken]


class ChoiceLogprobs(AnswerModel):
    """By the model itself, before temperature, cuts and penalties."""

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
    tool_calls: list[DeltaCall] = Field(default_factory=list)
    refusal: None = None


class ChunkChoice(AnswerModel):
    index: int
    delta: Delta
    logprobs: ChoiceLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"] | None


class ChatCompletionChunk(AnswerModel):
    """One event of a stream. The first one names the sources, the one with a finish reason says what they cost."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChunkChoice]
    usage: ChatUsage | None = None
    ragcache: ChatExtension = ChatExtension()
