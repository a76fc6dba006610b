"""/openapi.json: what every route takes and answers, errors included."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from ragcache.server.schemas.chat import ChatRequest
from ragcache.server.schemas.completion import ChatCompletionChunk
from ragcache.server.schemas.documents import AddDocuments, UploadProgress
from ragcache.server.schemas.embeddings import EmbeddingRequest
from ragcache.server.schemas.errors import ErrorBody
from ragcache.server.schemas.prompt import CompletionRequest, TokenizeRequest
from ragcache.server.schemas.rerank import RerankRequest
from ragcache.server.schemas.responses import ResponseEvent, ResponsesRequest
from ragcache.server.schemas.search import SearchRequest
from ragcache.server.sse import EVENT_STREAM

MEANINGS = {
    400: "The request cannot be carried out as it stands; `param` says what is wrong",
    401: "The API key is absent or wrong",
    403: "Not from here: another origin or host name; or the store is read-only",
    404: "There is nothing of this name",
    409: "Another change of the documents is under way; `Retry-After` says when to try again",
    413: "The body is too large",
    415: "The body is of another content type",
    500: "The server failed",
    503: "The server has too much to do, or is shutting down; `Retry-After` says when to try again",
    504: "The time for one request is up",
    507: "The store's device is full",
}
EVERYWHERE = (403, 500)
EVENT = {
    "type": "object",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["data"],
}
RETRY_LATER = ("409", "503")
# Bodies that routes read themselves, and the data of events: FastAPI does not see them.
MODELS: tuple[type[BaseModel], ...] = (
    ChatRequest, ChatCompletionChunk, CompletionRequest, ResponsesRequest, ResponseEvent, TokenizeRequest,
    SearchRequest, EmbeddingRequest, RerankRequest, AddDocuments, UploadProgress,
)  # fmt: skip
Responses = dict[int | str, dict[str, Any]]


def errors(*statuses: int) -> Responses:
    """`responses` of a route: what it answers when it fails."""
    return {status: {"model": ErrorBody, "description": MEANINGS[status]} for status in (*statuses, *EVERYWHERE)}


def streamed(model: type[BaseModel], description: str) -> dict[str, Any]:
    """A success that is JSON or, where it was asked for, a stream of events: the schema is one event's."""
    return {"model": model, "description": description, "content": {EVENT_STREAM: {"schema": EVENT}}}


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
    _, found = models_json_schema(
        [(model, "validation") for model in MODELS], ref_template="#/components/schemas/{model}"
    )
    schemas.update(found["$defs"])
    for name in ("HTTPValidationError", "ValidationError"):  # FastAPI's own answer to bad input, which is not ours
        schemas.pop(name, None)
    if locked:
        components["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
    for path, operations in document["paths"].items():
        for operation in operations.values():
            _complete(operation, locked=path.startswith(locked))
    return document


def _complete(operation: dict[str, Any], *, locked: bool) -> None:
    responses = operation["responses"]
    responses.pop("422", None)
    if locked:
        operation["security"] = [{"bearer": []}]
        schema = {"$ref": f"#/components/schemas/{ErrorBody.__name__}"}
        responses["401"] = {"description": MEANINGS[401], "content": {"application/json": {"schema": schema}}}
    for status, response in responses.items():
        headers = response.setdefault("headers", {})
        headers["X-Request-ID"] = {"description": "Names the request in the log", "schema": {"type": "string"}}
        if status in RETRY_LATER:
            headers["Retry-After"] = {"description": "Seconds", "schema": {"type": "string"}}
