"""POST /v1/embeddings."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from ragcache.server.schemas.base import AnswerModel, Name, RequestModel, Text
from ragcache.server.schemas.chat import TokenId

MAX_INPUTS = 2048
Input = Annotated[Text, Field(min_length=1)]
Ids = Annotated[list[TokenId], Field(min_length=1)]


def _form(given: Any) -> str:
    """Which of the four forms was meant: the errors are then about that one."""
    first = given[0] if isinstance(given, list) and given else None
    if isinstance(first, list):
        return "IdLists"
    if isinstance(given, list):
        return "Ids" if isinstance(first, int) else "Texts"
    return "Text"


Inputs = Annotated[
    Annotated[Input, Tag("Text")]
    | Annotated[list[Input], Field(min_length=1, max_length=MAX_INPUTS), Tag("Texts")]
    | Annotated[Ids, Tag("Ids")]
    | Annotated[list[Ids], Field(max_length=MAX_INPUTS), Tag("IdLists")],
    Discriminator(_form),
]


class EmbeddingRequest(RequestModel):
    """OpenAI's request. Token ids are those of this embedder's own tokenizer."""

    model: Name
    input: Inputs
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = Field(
        None, description="Fewer than the embedder's own number, where it was trained for that"
    )
    truncate: bool = Field(False, description="Read the beginning of a text that is too long, instead of refusing it")
    user: Text | None = None

    @property
    def inputs(self) -> list[str | list[int]]:
        """Each input: a text, or token ids."""
        if isinstance(self.input, str):
            return [self.input]
        if isinstance(self.input[0], int):
            return [[id for id in self.input if isinstance(id, int)]]
        return [one for one in self.input if not isinstance(one, int)]


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
