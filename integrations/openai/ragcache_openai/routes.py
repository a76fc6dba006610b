"""The routes of this package, and the indexer that runs while they are served."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import APIRouter, FastAPI

from ragcache.server.service import Service
from ragcache_openai import file_batches, files, responses, vector_store_files, vector_stores
from ragcache_openai.api import shared_state
from ragcache_openai.indexer import Indexer


@asynccontextmanager
async def _running(app: FastAPI) -> AsyncIterator[None]:
    service: Service = app.state.service
    state = shared_state(app)
    state.work = asyncio.Event()  # an event of this loop
    if service.kb.config.read_only:
        yield
        return
    indexer = Indexer(service, state.records, state.work)
    running = asyncio.create_task(indexer.run())
    try:
        yield
    finally:
        running.cancel()
        await asyncio.wait([running])


router = APIRouter(lifespan=_running)
for module in (responses, files, vector_stores, vector_store_files, file_batches):
    router.include_router(module.router)
