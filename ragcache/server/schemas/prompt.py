"""Bodies of POST /v1/completions and /tokenize."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from ragcache.server.schemas.base import AnswerModel, Name, RequestModel, Text
from ragcache.server.schemas.chat import LikeliestCount, ReadFields, SampledRequest
from ragcache.server.schemas.completion import ChatExtension, ChatUsage

PromptText = Annotated[Text, Field(min_length=1)]


class CompletionRequest(SampledRequest):
    """OpenAI's request: a raw prompt, read as it stands. Nothing is retrieved, and no template is put around it."""

    prompt: PromptText | Annotated[list[PromptText], Field(min_length=1, max_length=1)]
    logprobs: LikeliestCount | None = None
    ragcache: ReadFields | None = None

    # Accepted only where they ask for nothing.
    best_of: Annotated[int, Field(ge=1, le=1)] | None = None
    echo: Literal[False] | None = None
    suffix: None = None

    @property
    def text(self) -> str:
        return self.prompt if isinstance(self.prompt, str) else self.prompt[0]

    @property
    def likeliest(self) -> int | None:
        """`Sampling.logprobs`."""
        return self.logprobs

    @property
    def extension(self) -> ReadFields:
        return self.ragcache or ReadFields()


class TextLogprobs(AnswerModel):
    """Lists of one length: a token of the answer each."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int] = Field(description="Where the token's text begins in the answer's")


class TextChoice(AnswerModel):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Literal["stop", "length"] | None


class TextCompletion(AnswerModel):
    """An answer, or one event of a stream of them."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[TextChoice]
    usage: ChatUsage | None = None
    ragcache: ChatExtension = ChatExtension()


class TokenizeRequest(RequestModel):
    """vLLM's request; llama.cpp calls the prompt `content`, and adds no special tokens if not told to."""

    model: Name | None = None
    prompt: Text | None = None
    content: Text | None = None
    add_special_tokens: bool | None = Field(default=None, description="If absent: for a prompt, not for content")

    @model_validator(mode="after")
    def _says_one_thing(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.content is None):
            raise ValueError("give a prompt, or content as llama.cpp calls it")
        return self

    @property
    def text(self) -> str:
        return self.prompt or self.content or ""


class TokenList(AnswerModel):
    count: int
    max_model_len: int
    tokens: list[int]
