"""Errors as OpenAI's clients expect them: {"error": {"message", "type", "param", "code"}}, and their status codes."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import Scope

from ragcache import errors as engine
from ragcache.server.chat_types import UNSUPPORTED
from ragcache.server.error_object import EVENT_STREAM, ErrorBody, ErrorDetail

MAX_MESSAGE = 1000
TYPES = {401: "authentication_error", 429: "rate_limit_error"} | dict.fromkeys((409, 503, 504), "overloaded_error")
FAILURE = "the server failed; its log says more under this request's id"
UNAVAILABLE = "a part of the store does not answer; ask again later. The log says which under this request's id"
OWN_FAULTS = (500, 502)
METHODS = ("DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT")
# Status for a client that hung up. It reads no response, but logs and metrics show the status.
CLIENT_GONE = 499
# After a time-out a retry would take as long again. OpenAI's clients obey this header.
NO_RETRY = {"X-Should-Retry": "false"}


class ApiError(HTTPException):
    """An error response. It is an HTTPException, so that the framework's own parsers let it pass."""

    def __init__(
        self, status: int, message: str, code: str, param: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(status, message, dict(headers or {}))
        self.code = code
        self.param = param
        self.type = TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")

    def body(self) -> ErrorBody:
        message = printable(str(self.detail))
        return ErrorBody(error=ErrorDetail(message=message, type=self.type, param=self.param, code=self.code))

    def response(self, scope: Scope) -> Response:
        """Return the response in the form of the package that the path belongs to, or in OpenAI's."""
        forms, path = scope["app"].state.error_forms, scope["path"]
        form = next((form for start, form in forms.items() if f"{path}/".startswith(start)), ApiError.body)
        return Response(form(self).to_json(), self.status_code, self.headers, "application/json")


class ClientGoneError(Exception):
    """The client hung up."""


# The client hung up while the answer was made, or before its whole body arrived.
HUNG_UP = (ClientGoneError, ClientDisconnect)


class Meaning(NamedTuple):
    """The response to an error class of the engine. option: the engine's name of the option at fault"""

    status: int
    code: str
    option: str | None = None
    headers: Mapping[str, str] = {}


# Looked up by the nearest class in the error's class tree.
MEANINGS: dict[type[engine.RagCacheError], Meaning] = {
    engine.RagCacheError: Meaning(500, "internal_error"),
    engine.ConfigError: Meaning(400, "invalid_value"),
    engine.PromptError: Meaning(400, "invalid_prompt", option="question"),
    engine.ContextTooLongError: Meaning(400, "context_length_exceeded", option="question"),
    engine.AnswerTooLargeError: Meaning(400, "answer_too_large", option="max_tokens"),
    engine.FilterError: Meaning(400, "invalid_filter", option="filter"),
    engine.UnknownHandleError: Meaning(400, "unknown_handle", option="documents"),
    engine.IngestError: Meaning(400, "invalid_document", option="documents"),
    engine.NoSuchCollectionError: Meaning(404, "collection_not_found", option="collection"),
    engine.NotAllowedError: Meaning(403, "not_allowed"),
    engine.NoSuchDocumentError: Meaning(404, "document_not_found", option="id"),
    engine.StoreBusyError: Meaning(409, "store_busy", headers={"Retry-After": "2"}),
    engine.StoreReadOnlyError: Meaning(403, "store_read_only"),
    engine.StoreFullError: Meaning(507, "store_full"),
    engine.StoreUnreachableError: Meaning(503, "store_unavailable"),
    engine.EngineError: Meaning(502, "engine_failed"),
    engine.TimedOutError: Meaning(504, "request_timeout", headers=NO_RETRY),
    engine.CancelledError: Meaning(503, "cancelled", headers={"Retry-After": "2"}),
}
# The engine's options whose names differ in requests.
PLACES = {
    "question": ("messages", "prompt", "query", "input"),
    "json_schema": ("response_format", "text"),
    "max_tokens": ("max_tokens", "max_completion_tokens", "max_output_tokens"),
    "reasoning_effort": ("reasoning_effort", "reasoning"),
}


def from_engine(error: engine.RagCacheError, body: BaseModel | None = None) -> ApiError:
    """Return an engine error as a response. An error of the server itself gets a general message, because its own
    describes this machine.

    body: the request's body if it is JSON
    """
    meaning = next(MEANINGS[kind] for kind in type(error).__mro__ if kind in MEANINGS)
    message, headers = FAILURE if meaning.status in OWN_FAULTS else str(error), meaning.headers
    if isinstance(error, engine.StoreUnreachableError):
        message, headers = UNAVAILABLE, {"Retry-After": str(max(1, math.ceil(error.retry_s)))}
    option = error.option if isinstance(error, engine.ConfigError) else meaning.option
    return ApiError(
        meaning.status, message, meaning.code, None if option is None else place_of(option, body), headers=headers
    )


def place_of(option: str, body: BaseModel | None) -> str | None:
    """Return the path of an engine option in a request: at its top level or in its `ragcache`; None if it has none."""
    if body is None:
        return option
    inner: BaseModel = getattr(body, "extension", body)
    fields, extension = type(body).model_fields, type(inner).model_fields
    names = PLACES.get(option, (option,))
    if at_top := [name for name in names if name in fields]:
        return min(at_top, key=lambda name: name not in body.model_fields_set)  # the first given, or else the first
    return next((f"ragcache.{name}" for name in names if name in extension), None)


def as_api_error(error: Exception, body: BaseModel | None = None) -> ApiError:
    """Return any error as a response. An unexpected error gets a general message, because its own may hold text of
    documents.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, engine.RagCacheError):
        return from_engine(error, body)
    if isinstance(error, HTTPException):
        return _from_framework(error)
    return ApiError(500, FAILURE, "internal_error")


def _from_framework(error: HTTPException) -> ApiError:
    messages = {404: "there is no such route; GET /openapi.json lists them", 405: "the route does not take this method"}
    codes = {404: "not_found", 405: "method_not_allowed", 413: "request_too_large"}
    message = messages.get(error.status_code, str(error.detail))
    return ApiError(error.status_code, message, codes.get(error.status_code, "bad_request"), headers=error.headers)


def from_validation(problems: Sequence[Mapping[str, Any]]) -> ApiError:
    """Return an error for the most deeply nested problem: in a union, the alternative with this problem fits best.

    The value itself is not repeated, because it may be long or be text of a document.
    """
    problem = max(problems, key=lambda problem: len(problem["loc"]))
    place = list(problem["loc"])
    param = param_of(place) or None
    kind, message = str(problem["type"]), str(problem["msg"]).removeprefix("Value error, ")
    if kind == "json_invalid":
        return ApiError(400, f"the body is not JSON: {message.removeprefix('Invalid JSON: ')}", "invalid_json")
    if kind == "missing":
        return ApiError(400, f"'{param}' is missing", "missing_required_parameter", param)
    # Chat completions support tools, so a fault within these fields is an invalid value there. No other route has them.
    within = len(place) > 1 and place[0] in ("tools", "tool_choice")
    if place and place[0] in UNSUPPORTED and not within:
        return ApiError(
            400,
            f"'{place[0]}' is not supported by this server with this value; leave it out",
            "unsupported_parameter",
            str(place[0]),
        )
    if param and "content" in place and param.endswith(".type") and not within:
        message = f"only parts of type 'text' can be read ({message})"
    return ApiError(400, f"'{param}': {message}" if param else message, "invalid_value", param)


def param_of(place: Sequence[str | int]) -> str:
    """Return a path as text: ("messages", 0, "content") -> "messages[0].content".

    Names that pydantic inserts for the alternatives of a union are left out.
    """
    text = ""
    for part in place:
        if isinstance(part, int):
            text += f"[{part}]"
        elif re.fullmatch(r"(str|int|float|bool|dict|list|none|function-.*|.*\[.*|.*\(.*|[A-Z]\w*)", part) is None:
            text += f".{part}" if text else part
    return printable(text)[:200]


def printable(text: str) -> str:
    """Return a text that can be sent: lone surrogates escaped, at most MAX_MESSAGE characters."""
    clean = text.encode("utf-8", "backslashreplace").decode("utf-8")
    return clean if len(clean) <= MAX_MESSAGE else clean[:MAX_MESSAGE] + " ..."


def add_handlers(app: FastAPI) -> None:
    async def answer(request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException) and error.status_code == 405:
            error.headers = {"Allow": ", ".join(_methods_at(request))}
        return request.app.state.service.told(error, request).response(request.scope)  # type: ignore[no-any-return]

    async def invalid(request: Request, error: Exception) -> Response:
        problems = error.errors() if isinstance(error, RequestValidationError) else ()
        # A place begins with "path" or "query", which is no part of the name.
        problems = [{**problem, "loc": problem["loc"][1:] or problem["loc"]} for problem in problems]
        return await answer(request, from_validation(problems) if problems else error)

    async def gone(_request: Request, _error: Exception) -> Response:
        return Response(status_code=CLIENT_GONE)

    app.add_exception_handler(HTTPException, answer)
    app.add_exception_handler(engine.RagCacheError, answer)
    app.add_exception_handler(RequestValidationError, invalid)
    for kind in HUNG_UP:
        app.add_exception_handler(kind, gone)


def _methods_at(request: Request) -> list[str]:
    """Return the methods of all routes at the path; the framework names only those of the first route."""
    as_asked = {method: {**request.scope, "method": "GET" if method == "HEAD" else method} for method in METHODS}
    routes = request.app.routes
    return [one for one, scope in as_asked.items() if any(route.matches(scope)[0] is Match.FULL for route in routes)]


STATUS_MEANINGS = {
    400: "The request cannot be carried out as it stands; `param` says what is wrong",
    401: "The API key is absent or wrong",
    403: "Not from here: another origin or host name; or the store is read-only",
    404: "There is nothing of this name",
    408: "The body did not arrive in time",
    409: "Another change of the documents is under way; `Retry-After` says when to try again",
    413: "The body is too large",
    415: "The body is of another content type",
    429: "The API key has used up its rate; `Retry-After` says when to go on",
    500: "The server failed",
    503: "The server has too much to do, or is shutting down: `Retry-After` says when to try again; or its GPU failed",
    504: "The time for one request is up",
    507: "The store's device is full",
}
EVERYWHERE = (400, 403, 404, 500)
Responses = dict[int | str, dict[str, Any]]


def errors(*statuses: int, model: type[BaseModel] = ErrorBody) -> Responses:
    """Return the `responses` of a route for its errors. model: of an error's body"""
    return {status: {"model": model, "description": STATUS_MEANINGS[status]} for status in (*statuses, *EVERYWHERE)}


def streamed(model: type[BaseModel], description: str, data: type[BaseModel]) -> dict[str, Any]:
    """Describe, for a route's `responses`, a success that is JSON, or a stream of events on request.

    model: the JSON body. data: the body of an event
    """
    text = {"type": "string", "contentMediaType": "application/json", "contentSchema": schema_of(data)}
    any_of = {"anyOf": [text, {"const": "[DONE]"}]}
    event = {"type": "object", "properties": {"event": {"type": "string"}, "data": any_of}, "required": ["data"]}
    return {"model": model, "description": description, "content": {EVENT_STREAM: {"schema": event}}}


def schema_of(model: type[BaseModel]) -> dict[str, Any]:
    """Return a reference to a model's JSON schema, with definitions that `Application.openapi` moves to their place."""
    place = "#/components/schemas/{model}"
    _, definitions = models_json_schema([(model, "validation")], ref_template=place)
    return {"$ref": place.format(model=model.__name__), **definitions}
