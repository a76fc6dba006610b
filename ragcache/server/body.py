"""Request bodies: read once, strictly, into the model that documents them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from ragcache.server.http_errors import ApiError, from_validation

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

    also: another content type that the route takes, for the message
    """
    if content_type(request) != JSON:
        wanted = f"{JSON} or {also}" if also else JSON
        raise ApiError(415, f"send the body as Content-Type: {wanted}", "unsupported_media_type")
    body = await request.body()
    try:
        if len(body) > LARGE:
            asked = await asyncio.to_thread(model.model_validate_json, body)
        else:
            asked = model.model_validate_json(body)
    except ValidationError as error:
        raise from_validation(error.errors(include_url=False, include_input=False, include_context=False)) from error
    request.state.asked = asked  # errors name the place of their option in it
    return asked


def request_body(**content: type[BaseModel] | Mapping[str, Any]) -> dict[str, Any]:
    """`openapi_extra` of a route that reads its body itself. Names: json, multipart."""
    kinds = {"json": JSON, "multipart": MULTIPART}
    documented = {
        kinds[name]: {"schema": dict(schema) if isinstance(schema, Mapping) else ref(schema)}
        for name, schema in content.items()
    }
    return {"requestBody": {"required": True, "content": documented}}


def ref(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{model.__name__}"}
