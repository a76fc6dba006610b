"""/api: Ollama's routes for answers, embeddings and models, with its JSON lines and its errors."""

from __future__ import annotations

from fastapi.routing import APIRoute
from starlette.responses import PlainTextResponse

from ragcache_ollama import answers, embeddings, models
from ragcache_ollama.form import OllamaRouter

router = OllamaRouter(prefix="/api", tags=["ollama"])
for module in (answers, embeddings, models):
    router.include_router(module.router)


async def heartbeat() -> PlainTextResponse:
    """Report that the server runs, in the words that Ollama's programs expect."""
    return PlainTextResponse("Ollama is running")


router.routes.append(APIRoute("/", heartbeat, methods=["GET", "HEAD"], include_in_schema=False))
