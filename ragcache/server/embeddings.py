"""POST /v1/embeddings: vectors from the store's own embedder."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter
from pydantic import Discriminator, Field, Tag
from starlette.requests import Request
from starlette.responses import Response

from ragcache.errors import ConfigError, blaming
from ragcache.models.deadline import LIMIT
from ragcache.retrieval.embedder_types import BoundedEmbedder, Embedder, NestedEmbedder, TokenEmbedder, Vectors
from ragcache.retrieval.windows import embed_passages
from ragcache.server.body import JSON, JsonRoute
from ragcache.server.chat_types import TokenId
from ragcache.server.http_errors import ApiError, errors
from ragcache.server.observe import note
from ragcache.server.service import Service, ServiceParam, service_of
from ragcache.server.wire import AnswerModel, Name, RequestModel, Text

MAX_INPUTS = 2048
Input = Annotated[Text, Field(min_length=1)]
Ids = Annotated[list[TokenId], Field(min_length=1)]


def _form(value: Any) -> str:
    """Return the form of the input, so that errors refer to that form."""
    first = value[0] if isinstance(value, list) and value else None
    if isinstance(first, list):
        return "IdLists"
    if isinstance(value, list):
        return "Ids" if isinstance(first, int) else "Texts"
    return "Text"


Inputs = Annotated[
    Annotated[Input, Tag("Text")]
    | Annotated[list[Input], Field(min_length=1, max_length=MAX_INPUTS), Tag("Texts")]
    | Annotated[Ids, Tag("Ids")]
    | Annotated[list[Ids], Field(max_length=MAX_INPUTS), Tag("IdLists")],
    Discriminator(_form),
]


def listed(inputs: str | Sequence[str | int | list[int]]) -> list[str | list[int]]:
    """Return a list of inputs, each a text or token ids."""
    if isinstance(inputs, str):
        return [inputs]
    ids = [item for item in inputs if isinstance(item, int)]
    return [ids] if ids else [item for item in inputs if not isinstance(item, int)]


class EmbeddingRequest(RequestModel):
    """OpenAI's request. Token ids are those of this embedder's own tokenizer."""

    model: Name
    input: Inputs
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = Field(
        None, description="Fewer than the embedder's own number, where it was trained for that"
    )
    truncate: bool = Field(False, description="Embed a text that is too long in windows, instead of refusing it")
    user: Text | None = None

    @property
    def inputs(self) -> list[str | list[int]]:
        return listed(self.input)


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


router = APIRouter(route_class=JsonRoute, tags=["answers"])
# Texts between two checks whether the client has hung up.
BATCH = 64


@router.post(
    "/v1/embeddings",
    summary="Embed texts",
    responses={200: {"model": EmbeddingList}, **errors(400, 404, 413, 415, 503, 504)},
)
async def create_embeddings(request: Request, service: ServiceParam, body: EmbeddingRequest) -> Response:
    vectors, tokens = await embed(request, body)
    return Response(await service.in_thread(_answer, body, vectors, tokens), media_type=JSON)


async def embed(request: Request, body: EmbeddingRequest) -> tuple[Vectors, int]:
    """Return the vectors [len(inputs), dimensions] and the number of tokens read. Raises ApiError."""
    service = service_of(request)
    service.check_model(body.model, service.embedding_model)
    _check_dimensions(service.kb.embedder, body)
    vectors, tokens = await service.compute(request, _vectors, service, body)
    note(request, texts=len(body.inputs), tokens=tokens)
    return vectors, tokens


def _check_dimensions(embedder: Embedder, body: EmbeddingRequest) -> None:
    """Raise ApiError (400) for a number of dimensions that the embedder was not trained for."""
    known = embedder.dimensions if isinstance(embedder, NestedEmbedder) else (embedder.dimension,)
    if body.dimensions is not None and body.dimensions not in known:
        numbers = f"1 to {known.stop - 1}" if isinstance(known, range) else ", ".join(map(str, known))
        raise ApiError(
            400,
            f"{body.model} has {numbers} dimensions; choose of these, or leave 'dimensions' out",
            "invalid_value",
            "dimensions",
        )


def _vectors(service: Service, body: EmbeddingRequest) -> tuple[Vectors, int]:
    """Return the vectors and token count for `embed`.

    Raises ApiError (400) for a text that is longer than the embedder reads at once, CancelledError on a signal of
    `LIMIT`.
    """
    embedder = service.kb.embedder
    texts = [item if isinstance(item, str) else _text(embedder, item) for item in body.inputs]
    tokens = [count for batch in _batches(texts) for count in _counted(service, batch, body.truncate)]
    vectors = np.concatenate([embed_passages(embedder, batch) for batch in _batches(texts)])
    return _cut(vectors, body.dimensions), sum(tokens)


def _text(embedder: Embedder, ids: Sequence[int]) -> str:
    if not isinstance(embedder, TokenEmbedder):
        raise ConfigError(f"{embedder.name} reads no token ids; send text", "input")
    with blaming("input"):
        return embedder.text_of(ids)


def _cut(vectors: Vectors, dimensions: int | None) -> Vectors:
    """Return the first `dimensions` of each vector, normalised again, as OpenAI and vLLM do."""
    if dimensions is None or dimensions == vectors.shape[1]:
        return vectors
    cut = vectors[:, :dimensions]
    norms = np.linalg.norm(cut, axis=1, keepdims=True)
    return np.asarray(cut / np.maximum(norms, np.finfo(np.float32).tiny), np.float32)


def _batches(texts: Sequence[str]) -> Iterator[Sequence[str]]:
    """Yield the texts in batches. Before each the client's connection is checked, whatever the embedder."""
    for start in range(0, len(texts), BATCH):
        LIMIT.get().check()
        yield texts[start : start + BATCH]


def _counted(service: Service, texts: Sequence[str], truncate: bool) -> list[int]:
    embedder = service.kb.embedder
    if not isinstance(embedder, BoundedEmbedder):
        return [service.kb.count_tokens(text) for text in texts]
    counts = embedder.count_tokens(texts)
    for count, text in zip(counts, texts, strict=True):
        if count > embedder.max_tokens and not truncate:
            raise ApiError(
                400,
                f"a text of {len(text)} characters has more than the {embedder.max_tokens} tokens that "
                f"{service.embedding_model} reads; split it, or set 'truncate' to true",
                "context_length_exceeded",
                "input",
            )
    return counts


def _answer(body: EmbeddingRequest, vectors: Vectors, tokens: int) -> str:
    """Return the response as JSON. Call it in a thread, since many numbers take long to write."""
    data = [
        Embedding(object="embedding", index=rank, embedding=_encoded(vector, body.encoding_format))
        for rank, vector in enumerate(vectors)
    ]
    usage = EmbeddingUsage(prompt_tokens=tokens, total_tokens=tokens)
    return EmbeddingList(object="list", model=body.model, data=data, usage=usage).to_json()


def _encoded(vector: Vectors, form: str | None) -> list[float] | str:
    if form == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode("ascii")
    return [float(number) for number in vector]
