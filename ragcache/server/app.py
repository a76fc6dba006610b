"""The ASGI application: its routes, its middleware and the schema at /openapi.json."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from fastapi import APIRouter, FastAPI

from ragcache import RagCache, __version__
from ragcache.engine.keys import KeyFile
from ragcache.errors import ConfigError
from ragcache.plugins import ROUTES, Registry
from ragcache.server import chat, document_routes, embeddings
from ragcache.server.auth import ApiKeys, Guard, is_open
from ragcache.server.http_errors import STATUS_MEANINGS, add_handlers
from ragcache.server.limits import BodyLimit
from ragcache.server.observe import Observe
from ragcache.server.service import Service
from ragcache.server.settings import ServerSettings
from ragcache.server.status import models_router, operation_router, store_router
from ragcache.server.tracing import tracer

ROUTERS = (chat.router, embeddings.router, document_routes.router, models_router, store_router, operation_router)
ADDED: Registry[APIRouter] = Registry(ROUTES)
"""Routers that installed packages add. A router may have an attribute `error_body`, a function that turns an ApiError
into the body of errors below the router's prefix.
"""
OPEN, PAGE = ("/healthz", "/readyz", "/openapi.json"), ("/", "/static/")
"""Paths that need no API key, and the paths of the chat page."""
PAGE_NAME = "page"
"""Name of the chat page among the added routes. Its routes are left out unless `web` is set."""
DESCRIPTION = "OpenAI's API over a ragcache store: passages are retrieved, and their precomputed KV is reused."


def create_app(kb: RagCache, settings: ServerSettings | None = None, *, web: bool = False) -> FastAPI:
    """Return an ASGI application that serves a knowledge base. The caller closes the knowledge base.

    web: serve the chat page at "/" too

    Raises ConfigError if `web` is set and the chat page is not installed, for a key file that cannot be used, and if an
    OpenTelemetry exporter is named but not installed.
    """
    settings = settings or ServerSettings()
    added = {name: router for name, router in ADDED.items() if web or name != PAGE_NAME}
    if web and PAGE_NAME not in added:
        raise ConfigError("the chat page is not installed; install ragcache-kv again, with its annex ragcache_chatbot")
    tracer()  # raises now, not at the first question, if an exporter is named but not installed
    service = Service(kb, settings)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        await service.start()
        yield
        service.stop()
        service.cancel_all()
        service.close()

    app = Application(
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
    # The page's "/" has priority over that of another added route.
    first = [added[PAGE_NAME]] if PAGE_NAME in added else []
    for router in (*ROUTERS, *first, *(router for router in added.values() if router not in first)):
        app.include_router(router)
    forms = {f"{router.prefix}/": getattr(router, "error_body", None) for router in added.values()}
    app.state.error_forms = {start: form for start, form in forms.items() if form is not None}
    add_handlers(app)
    # Every route needs a key, however a package nests its routes.
    open_paths = (*OPEN, *(PAGE if web else ()), *(("/metrics",) if settings.open_metrics else ()))
    keys = ApiKeys(settings.api_keys, None if settings.key_file is None else KeyFile(settings.key_file))
    app.open_paths = open_paths if keys else None
    # The last middleware added sees a request first.
    sizes = settings.max_body_bytes, settings.max_upload_bytes
    app.add_middleware(BodyLimit, *sizes, document_routes.PATH, settings.receive_s)
    app.add_middleware(Guard, keys, open_paths, settings.allowed_hosts, service.quotas)
    app.add_middleware(Observe, service.metrics)
    return app


RETRY_LATER = ("409", "429", "503")


class Application(FastAPI):
    """FastAPI with a schema that also describes the middleware: its errors, API keys and headers.

    open_paths: paths that need no key; None: no path needs a key
    """

    open_paths: Sequence[str] | None = None

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            document = super().openapi()  # keeps the schema in `openapi_schema`
            schemas = document["components"]["schemas"]
            schemas |= _definitions(document["paths"])
            for name in ("HTTPValidationError", "ValidationError"):  # FastAPI's answer to bad input; ours is ErrorBody
                schemas.pop(name, None)
            if self.open_paths is not None:
                document["components"]["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
            for path, operations in document["paths"].items():
                locked = self.open_paths is not None and not is_open(path, self.open_paths)
                for operation in operations.values():
                    _complete(operation, locked=locked)
        return super().openapi()


def _definitions(node: Any) -> dict[str, Any]:
    """Remove the definitions that `schema_of` put into the schemas of events, and return them."""
    parts = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    found = node.pop("$defs", {}) if isinstance(node, dict) else {}
    return found | {name: schema for part in parts for name, schema in _definitions(part).items()}


def _complete(operation: dict[str, Any], *, locked: bool) -> None:
    responses = operation["responses"]
    responses.pop("422", None)
    if "413" in responses:
        responses["408"] = {**responses["413"], "description": STATUS_MEANINGS[408]}
    if locked:
        operation["security"] = [{"bearer": []}]
        for status in (401, 429):  # the form is the same
            responses[str(status)] = {**responses.get("500", {}), "description": STATUS_MEANINGS[status]}
    for status, response in responses.items():
        headers = response.setdefault("headers", {})
        headers["X-Request-ID"] = {"description": "Names the request in the log", "schema": {"type": "string"}}
        if status in RETRY_LATER:
            headers["Retry-After"] = {"description": "Seconds", "schema": {"type": "string"}}
