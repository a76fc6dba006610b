"""/api/embed: vectors of texts."""

from __future__ import annotations

import time

from fastapi import APIRouter
from starlette.requests import Request

from ragcache.server.body import checked
from ragcache.server.embeddings import EmbeddingRequest, embed
from ragcache.server.service import service_of
from ragcache_ollama.bodies import Embeddings, EmbedRequest
from ragcache_ollama.form import NS, AnyTypeRoute, failures, served_name

router = APIRouter(route_class=AnyTypeRoute)


@router.post("/embed", summary="Embed texts", responses=failures(400, 404, 413, 503, 504))
async def embed_texts(request: Request, asked: EmbedRequest) -> Embeddings:
    started, service = time.perf_counter(), service_of(request)
    name = served_name(service, asked.model)
    lists, tokens = list[list[float]](), 0
    if asked.input:
        # An empty text gets the vector of a blank, since embedders take no empty text.
        inputs = [text or " " for text in ([asked.input] if isinstance(asked.input, str) else asked.input)]
        truncate = asked.truncate is not False
        told = checked(EmbeddingRequest, model=name, input=inputs, dimensions=asked.dimensions, truncate=truncate)
        vectors, tokens = await embed(request, told)
        lists = await service.in_thread(vectors.tolist)
    else:  # by such a request Ollama loads the model
        service.check_model(name, service.embedding_model)
    return Embeddings(
        model=asked.model,
        embeddings=lists,
        total_duration=int((time.perf_counter() - started) * NS),
        load_duration=0,
        prompt_eval_count=tokens,
    )
