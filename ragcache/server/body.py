"""Request bodies: read once, strictly, into the model that documents them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from ragcache.server.http_errors import ApiError, from_validation, printable, schema_of
from ragcache.server.observe import warn
from ragcache.server.service import service_of
from ragcache.server.wire import RequestModel

JSON = "application/json"
MULTIPART = "multipart/form-data"
# Takes milliseconds to parse: not on the event loop.
LARGE = 256 * 1024
Model = TypeVar("Model", bound=BaseModel)


def content_type(request: Request) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


async def read_json(request: Request, model: type[Model], *, also: str = "") -> Model:
    """The body as the model says. pydantic's own parser reads the bytes: it refuses what is no UTF-8, half a surrogate
    pair, or nested without end, before anything is built.

    also: another content type that the route takes, for the message; "*/*": the body is JSON, whatever its type
    """
    if content_type(request) != JSON and also != "*/*":
        wanted = f"{JSON} or {also}" if also else JSON
        raise ApiError(415, f"send the body as Content-Type: {wanted}", "unsupported_media_type")
    body = await request.body()
    asked, unknown = await asyncio.to_thread(_read, model, body) if len(body) > LARGE else _read(model, body)
    request.state.asked = asked  # errors name the place of their option in it
    if unknown and service_of(request).settings.strict:
        param = printable(unknown[0])[:200]
        raise ApiError(400, f"'{param}' is unknown here; check its name or leave it out", "unknown_parameter", param)
    if unknown:
        warn(request, f"unknown fields ignored: {', '.join(unknown)}")
    return asked


def _read(model: type[Model], body: bytes) -> tuple[Model, list[str]]:
    """The body, and places of the fields in it that are not known."""
    try:
        asked = model.model_validate_json(body)
    except ValidationError as error:
        raise from_validation(error.errors(include_url=False, include_input=False, include_context=False)) from error
    return asked, list(_dropped(asked))


def _dropped(value: Any, place: str = "") -> Iterator[str]:
    """Drop unknown fields, so that no template is told of them. Their places, such as "tools[0].colour"."""
    if isinstance(value, list):
        for rank, item in enumerate(value):
            if isinstance(item, RequestModel):
                yield from _dropped(item, f"{place}[{rank}]")
    elif isinstance(value, RequestModel):
        dot, extra = "." if place else "", value.model_extra or {}
        yield from (f"{place}{dot}{name}" for name in extra)
        extra.clear()
        for name, item in value.__dict__.items():
            yield from _dropped(item, f"{place}{dot}{name}")


def request_body(**content: type[BaseModel] | Mapping[str, Any]) -> dict[str, Any]:
    """`openapi_extra` of a route that reads its body itself. Names: json, multipart."""
    kinds = {"json": JSON, "multipart": MULTIPART}
    documented = {
        kinds[name]: {"schema": dict(schema) if isinstance(schema, Mapping) else schema_of(schema)}
        for name, schema in content.items()
    }
    return {"requestBody": {"required": True, "content": documented}}
