"""Bodies of /v1/completions and /tokenize, and their responses."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from ragcache.server.chat_types import MAX_ANSWERS, ChatExtension, ChatUsage, LikeliestCount, SampledRequest
from ragcache.server.embeddings import Inputs, listed
from ragcache.server.wire import AnswerModel, Name, RequestModel, Text


class CompletionRequest(SampledRequest):
    """OpenAI's request for completions of raw prompts: nothing is retrieved, and no chat template is applied."""

    prompt: Inputs
    logprobs: LikeliestCount | None = None

    # Features that this server lacks: only values that disable them are accepted.
    best_of: Annotated[int, Field(ge=1)] | None = None
    echo: Literal[False] | None = None
    suffix: Literal[""] | None = None

    @field_validator("prompt")
    @classmethod
    def _is_not_too_many(cls, prompt: Inputs, given: ValidationInfo) -> Inputs:
        if len(listed(prompt)) * (given.data.get("n") or 1) > MAX_ANSWERS:
            raise ValueError(f"prompts times n are more than {MAX_ANSWERS} answers; send fewer at once")
        return prompt

    @field_validator("best_of")
    @classmethod
    def _leaves_none_out(cls, best_of: int | None, given: ValidationInfo) -> int | None:
        if best_of is not None and best_of != (given.data.get("n") or 1):
            raise ValueError("every answer is given; make it n")
        return best_of

    @property
    def prompts(self) -> list[str | list[int]]:
        return listed(self.prompt)

    @property
    def likeliest(self) -> int | None:
        """Return the value for `Sampling.logprobs`."""
        return self.logprobs


class TextLogprobs(AnswerModel):
    """Log-probabilities of an answer. Each list has an element for each token of the answer."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] = Field(
        description="By text; of two tokens with one text, as those of no whole character, the second is token_id:N"
    )
    text_offset: list[int] = Field(description="Where the token's text begins in the answer's")


class TextChoice(AnswerModel):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Literal["stop", "length"] | None


class TextCompletion(AnswerModel):
    """An answer, or an event of its stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[TextChoice]
    usage: ChatUsage | None = None
    ragcache: ChatExtension = ChatExtension()


class TokenizeRequest(RequestModel):
    """A request for a text's token ids: `prompt` as in vLLM, or `content` as in llama.cpp, without special tokens."""

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
