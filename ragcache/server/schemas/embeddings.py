"""POST /v1/embeddings."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ragcache.server.schemas.base import AnswerModel, Name, RequestModel, Text

MAX_INPUTS = 2048
Input = Annotated[Text, Field(min_length=1)]


class EmbeddingRequest(RequestModel):
    """OpenAI's request. Token ids belong to another tokenizer than this embedder's: send text."""

    model: Name
    input: Input | Annotated[list[Input], Field(min_length=1, max_length=MAX_INPUTS)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = Field(
        None, description="Only the embedder's own number"
    )
    truncate: bool = Field(False, description="Read the beginning of a text that is too long, instead of refusing it")
    user: Text | None = None

    @property
    def texts(self) -> list[str]:
        return [self.input] if isinstance(self.input, str) else self.input


class Embedding(AnswerModel):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str = Field(description="Numbers, or little-endian float32 as base64")


class EmbeddingUsage(AnswerModel):
    prompt_tokens: int = Field(description="That the embedder read, where it counts them")
    total_tokens: int


class EmbeddingList(AnswerModel):
    object: Literal["list"]
    model: str
    data: list[Embedding]
    usage: EmbeddingUsage
