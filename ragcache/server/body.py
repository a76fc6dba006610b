"""Request bodies: read once, and parsed strictly into the model that the route declares."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, TypeVar

from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from ragcache.server.http_errors import ApiError, from_validation, printable
from ragcache.server.observe import WARNING, tell
from ragcache.server.service import service_of
from ragcache.server.wire import RequestModel

JSON = "application/json"
MULTIPART = "multipart/form-data"
# Bytes: a larger body is parsed in a thread, because that takes milliseconds.
LARGE = 256 * 1024
Model = TypeVar("Model", bound=BaseModel)


class JsonRoute(APIRoute):
    """A route whose body is parsed by `read_json` instead of FastAPI, which still documents it and passes it to the
    endpoint. Fields that a response does not set are left out of its JSON, and unknown query parameters are refused.

    content_type: the body's content type, as `read_json` takes it
    """

    content_type: ClassVar[str] = JSON

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{**options, "response_model_exclude_unset": True})

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle, body = super().get_route_handler(), self.body_field
        known = _query_names(self.dependant)
        model: type[BaseModel] | None = body and body.field_info.annotation  # type: ignore[assignment]

        async def read(request: Request) -> Response:
            for name in request.query_params.keys() - known:
                name = printable(name)[:200]
                listed = f"known are {', '.join(sorted(known))}" if known else "this route takes none"
                raise ApiError(400, f"the query parameter '{name}' is unknown; {listed}", "unknown_parameter", name)
            if model is None:
                return await handle(request)
            await read_json(request, model, self.content_type)
            return await handle(_ReadRequest(request.scope, request.receive))

        return read


def _query_names(of: Dependant) -> set[str]:
    """Return the names of the query parameters that a route or one of its dependencies takes."""
    return {field.alias for field in of.query_params}.union(*map(_query_names, of.dependencies))


class _ReadRequest(Request):
    """A request whose body is the object that `read_json` parsed."""

    async def json(self) -> Any:
        return self.state.asked

    body = json


def content_type(request: Request) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


async def read_json(request: Request, model: type[Model], accepted: str = JSON) -> Model:
    """Parse the body into a model. pydantic's parser reads the bytes: it refuses text that is not UTF-8, lone
    surrogates and endless nesting before it builds anything.

    accepted: content types that the route takes, for the message; empty: the body is JSON, whatever its type

    Raises ApiError: 415 for another content type, 400 for a body that does not fit the model, or that has unknown
    fields if the server is strict.
    """
    if accepted and content_type(request) != JSON:
        raise ApiError(415, f"send the body as Content-Type: {accepted}", "unsupported_media_type")
    body = await request.body()
    parsed, unknown = await asyncio.to_thread(_parse, model, body) if len(body) > LARGE else _parse(model, body)
    request.state.asked = parsed  # errors look up in it how the request names an option
    check_unknown(request, unknown)
    return parsed


def check_unknown(request: Request, unknown: list[str]) -> None:
    """Warn of unknown fields. Raises ApiError (400) naming the first field if the server is strict."""
    if unknown and service_of(request).settings.strict:
        param = printable(unknown[0])[:200]
        raise ApiError(400, f"'{param}' is unknown here; check its name or leave it out", "unknown_parameter", param)
    if unknown:
        tell(request, WARNING, f"unknown fields ignored: {', '.join(unknown)}")


def _parse(model: type[Model], body: bytes) -> tuple[Model, list[str]]:
    """Return the body, and the paths of its unknown fields."""
    with _validated():
        asked = model.model_validate_json(body)
    return asked, list(_dropped(asked))


def checked(model: type[Model], /, **fields: Any) -> Model:
    """Return a model made of these fields, such as another body's. Raises ApiError (400) for invalid fields."""
    with _validated():
        return model(**fields)


@contextmanager
def _validated() -> Iterator[None]:
    """Translate pydantic's errors. Raises ApiError (400)."""
    try:
        yield
    except ValidationError as error:
        raise from_validation(error.errors(include_url=False, include_input=False, include_context=False)) from error


def _dropped(value: Any, place: str = "") -> Iterator[str]:
    """Drop unknown fields, so that no template reads them, and yield their paths, such as "tools[0].colour"."""
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


def request_body(content: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the `openapi_extra` of a route that reads its body itself.

    content: schemas by content type
    """
    schemas = {kind: {"schema": schema} for kind, schema in content.items()}
    return {"requestBody": {"required": True, "content": schemas}}
