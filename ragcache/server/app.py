"""The application: routes, the layers around them, and /openapi.json: what every route takes and answers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.openapi.utils import get_openapi

from ragcache import RagCache, __version__
from ragcache.plugins import ROUTES, Registry
from ragcache.server import chat, document_routes, embeddings
from ragcache.server.auth import Guard
from ragcache.server.http_errors import STATUS_MEANINGS, add_handlers
from ragcache.server.limits import SizeLimit
from ragcache.server.observe import Observe
from ragcache.server.service import Service
from ragcache.server.settings import ServerSettings
from ragcache.server.status import models_router, mount_page, operation_router, page_directory, store_router

PARTS = (chat, embeddings, document_routes)
ROUTERS = (*(part.router for part in PARTS), models_router, store_router, operation_router)
ADDED: Registry[APIRouter] = Registry(ROUTES)
"""Routes of packages. Attributes that a router may have: `error_body` makes the errors below its prefix; `view` makes
of the knowledge base what all requests see, without the documents that the package keeps for its own routes."""
DESCRIPTION = "OpenAI's API over a ragcache store: passages are retrieved, and their precomputed KV is reused."


def create_app(kb: RagCache, settings: ServerSettings | None = None, *, web: bool = False) -> FastAPI:
    """An ASGI application over one knowledge base, which stays the caller's to close.

    web: serve the chat page at "/" too

    Raises ConfigError when the page is wanted and not installed.
    """
    settings = settings or ServerSettings()
    added = [ADDED[name] for name in ADDED]
    service = Service(kb, settings, [router.view for router in added if hasattr(router, "view")])

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
    for router in (*ROUTERS, *added):
        app.include_router(router)
    forms = {f"{router.prefix}/": getattr(router, "error_body", None) for router in added}
    app.state.error_forms = {start: form for start, form in forms.items() if form is not None}
    app.state.routes = [*app.routes, *(route for router in (*ROUTERS, *added) for route in router.routes)]
    if web:
        mount_page(app, page_directory())
    add_handlers(app)
    theirs = (getattr(route, "path", "/").partition("{")[0] for router in added for route in router.routes)
    protected = ("/v1", *theirs, *(() if settings.open_metrics else ("/metrics",)))
    describe(app, protected if settings.api_keys else ())
    # The last one added is the first to see a request.
    app.add_middleware(SizeLimit, settings.max_body_bytes, settings.max_upload_bytes, document_routes.PATH)
    app.add_middleware(Guard, settings.api_keys, protected, settings.allowed_hosts)
    app.add_middleware(Observe, service.metrics)
    return app


RETRY_LATER = ("409", "503")


def describe(app: FastAPI, locked: tuple[str, ...]) -> None:
    """Make `app.openapi` complete. locked: beginnings of the paths that need a key."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app, locked)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _document(app: FastAPI, locked: tuple[str, ...]) -> dict[str, Any]:
    document = get_openapi(
        title=app.title, version=app.version, summary=app.summary, description=app.description, routes=app.routes
    )
    components = document.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    schemas.update(_definitions(document["paths"]))
    for name in ("HTTPValidationError", "ValidationError"):  # FastAPI's own answer to bad input, which is not ours
        schemas.pop(name, None)
    if locked:
        components["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
    for path, operations in document["paths"].items():
        for operation in operations.values():
            _complete(operation, locked=path.startswith(locked))
    return document


def _definitions(node: Any) -> dict[str, Any]:
    """Take out the definitions that `schema_of` put into schemas of bodies and events."""
    parts = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    found = node.pop("$defs", {}) if isinstance(node, dict) else {}
    return found | {name: schema for part in parts for name, schema in _definitions(part).items()}


def _complete(operation: dict[str, Any], *, locked: bool) -> None:
    responses = operation["responses"]
    responses.pop("422", None)
    if locked:
        operation["security"] = [{"bearer": []}]
        responses["401"] = {**responses["500"], "description": STATUS_MEANINGS[401]}  # the form is the same
    for status, response in responses.items():
        headers = response.setdefault("headers", {})
        headers["X-Request-ID"] = {"description": "Names the request in the log", "schema": {"type": "string"}}
        if status in RETRY_LATER:
            headers["Retry-After"] = {"description": "Seconds", "schema": {"type": "string"}}
