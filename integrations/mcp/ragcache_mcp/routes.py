"""/mcp of `ragcache serve`: the same tools over streamable HTTP, with the server's keys, limits and slots."""

from __future__ import annotations

import importlib.util
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import APIRouter, FastAPI
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from ragcache.server.service import Service, seen_service

PATH = "/mcp"


@asynccontextmanager
async def _running(app: FastAPI) -> AsyncIterator[None]:
    from mcp.server.transport_security import TransportSecuritySettings

    from ragcache_mcp.served import ServedTools
    from ragcache_mcp.tools import build

    service: Service = app.state.service
    tools = ServedTools(service.kb, service.settings.answers.call_options())
    server = build(tools, writes=not service.kb.config.read_only)
    # Calls are independent: no session is kept, and a client that hangs up ends only its own call. The server itself
    # checks hosts for all routes.
    checked = TransportSecuritySettings(enable_dns_rebinding_protection=False)
    server.streamable_http_app(stateless_http=True, transport_security=checked)
    async with server.session_manager.run():
        app.state.mcp = server.session_manager
        yield


class _Endpoint:
    """The ASGI application at PATH. The server has already checked key, host and size."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        from ragcache_mcp.served import SEEN

        SEEN.set(await seen_service(Request(scope)))  # the call runs in a task that has this request's context
        await scope["app"].state.mcp.handle_request(scope, receive, send)


def _router() -> APIRouter:
    """Return the router, which has no routes if the extra is absent."""
    if importlib.util.find_spec("mcp") is None:
        return APIRouter()
    router = APIRouter(lifespan=_running)
    endpoint: Any = _Endpoint()
    router.routes.append(Route(PATH, endpoint, include_in_schema=False))
    return router


router = _router()
