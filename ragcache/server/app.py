"""The application: routes, and the layers around them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

from ragcache import RagCache, __version__
from ragcache.server import (
    chat,
    completions,
    documents,
    embeddings,
    health,
    models,
    rerank,
    responses,
    search,
    store,
)
from ragcache.server.auth import Guard
from ragcache.server.errors import add_handlers
from ragcache.server.limits import SizeLimit
from ragcache.server.observe import Observe
from ragcache.server.openapi import describe
from ragcache.server.page import mount_page, page_directory
from ragcache.server.service import Service
from ragcache.server.settings import ServerSettings

PARTS = (chat, completions, responses, embeddings, rerank, models, documents, search, store, health)
ROUTERS = tuple(part.router for part in PARTS)
DESCRIPTION = "OpenAI's API over a ragcache store: passages are retrieved, and their precomputed KV is reused."


def create_app(kb: RagCache, settings: ServerSettings | None = None, *, web: bool = False) -> FastAPI:
    """An ASGI application over one knowledge base, which stays the caller's to close.

    web: serve the chat page at "/" too

    Raises ConfigError when the page is wanted and not installed.
    """
    settings = settings or ServerSettings()
    service = Service(kb, settings)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        await service.start()
        yield
        service.stop()
        service.cancel_all()
        service.close()

    app = FastAPI(
        title="ragcache",
        version=__version__,
        summary="Answers from documents that were read once",
        description=DESCRIPTION,
        lifespan=lifespan,
        docs_url=None,  # its page loads scripts from another host
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.service = service
    for router in ROUTERS:
        app.include_router(router)
    app.state.routes = [*app.routes, *(route for router in ROUTERS for route in router.routes)]
    if web:
        mount_page(app, page_directory())
    add_handlers(app)
    protected = ("/v1", "/tokenize", *(() if settings.open_metrics else ("/metrics",)))
    describe(app, protected if settings.api_keys else ())
    # The last one added is the first to see a request.
    app.add_middleware(SizeLimit, settings.max_body_bytes, settings.max_upload_bytes, documents.PATH)
    app.add_middleware(Guard, settings.api_keys, protected, settings.allowed_hosts)
    app.add_middleware(Observe, service.metrics)
    return app
