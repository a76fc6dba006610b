"""/api/embed and /api/embeddings."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import chain

from fastapi import APIRouter
from starlette.requests import Request

from ragcache.server.body import checked
from ragcache.server.embeddings import EmbeddingRequest, embed
from ragcache.server.service import service_of
from ragcache_ollama.bodies import Embeddings, EmbeddingsRequest, EmbedRequest, OneEmbedding
from ragcache_ollama.form import NS, AnyTypeRoute, failures, served_name

router = APIRouter(route_class=AnyTypeRoute)


@router.post("/embed", summary="Embed texts", responses=failures(400, 404, 413, 503, 504))
async def embed_texts(request: Request, asked: EmbedRequest) -> Embeddings:
    started = time.perf_counter()
    texts = [asked.input] if isinstance(asked.input, str) else asked.input
    vectors, tokens = await embedded(request, asked.model, [] if asked.input == "" else texts, asked)
    return Embeddings(
        model=asked.model,
        embeddings=vectors,
        total_duration=int((time.perf_counter() - started) * NS),
        load_duration=0,
        prompt_eval_count=tokens,
    )


@router.post("/embeddings", summary="Embed one text, the older way", responses=failures(400, 404, 413, 503, 504))
async def embed_text(request: Request, asked: EmbeddingsRequest) -> OneEmbedding:
    vectors, _ = await embedded(request, asked.model, [asked.prompt] if asked.prompt else [])
    return OneEmbedding(embedding=list(chain(*vectors)))


async def embedded(
    request: Request, model: str, texts: Sequence[str], asked: EmbedRequest | None = None
) -> tuple[list[list[float]], int]:
    """Return the vectors of texts, and the number of tokens read. Raises ApiError."""
    service = service_of(request)
    name = served_name(service, model)
    if not texts:  # Ollama loads the model
        service.check_model(name, service.embedding_model)
        return [], 0
    dimensions, truncate = (asked.dimensions, asked.truncate) if asked else (None, None)
    # An empty text gets the vector of a blank, since embedders take no empty text.
    inputs = [text or " " for text in texts]
    told = checked(EmbeddingRequest, model=name, input=inputs, dimensions=dimensions, truncate=truncate is not False)
    vectors, tokens = await embed(request, told)
    return await service.in_thread(vectors.tolist), tokens
