"""/api: Ollama's routes for answers, embeddings and models, with its JSON lines and its errors."""

from __future__ import annotations

from ragcache_ollama import answers, embeddings, models
from ragcache_ollama.form import OllamaRouter

router = OllamaRouter(prefix="/api", tags=["ollama"])
for module in (answers, embeddings, models):
    router.include_router(module.router)
