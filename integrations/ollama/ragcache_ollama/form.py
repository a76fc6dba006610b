"""The form of Ollama's API: its errors, lines, names and times."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import partial
from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel

from ragcache.server.body import JsonRoute
from ragcache.server.http_errors import ApiError, errors, schema_of
from ragcache.server.service import Service
from ragcache_ollama.bodies import OllamaError

NDJSON = "application/x-ndjson"
NS = 1_000_000_000
LATEST = ":latest"


class OllamaRouter(APIRouter):
    """A router whose errors have Ollama's form."""

    @staticmethod
    def error_body(problem: ApiError) -> OllamaError:
        return OllamaError(error=problem.body().error.message)


class AnyTypeRoute(JsonRoute):
    """A route that reads JSON whatever its content type: Ollama's own documentation sends it with curl's default."""

    content_type = ""


failures = partial(errors, model=OllamaError)
"""Returns the `responses` of a route for errors with these status codes, in Ollama's form."""


def lines(model: type[BaseModel], description: str) -> dict[str, Any]:
    """Return a success response that is JSON, or lines of JSON."""
    return {"model": model, "description": description, "content": {NDJSON: {"schema": schema_of(model)}}}


def served_name(service: Service, asked: str) -> str:
    """Return the server's name of a model. Ollama's names have a tag, which is `:latest` by default."""
    names = (service.chat_model, service.plain_model, service.embedding_model)
    return next((name for name in (asked, asked + LATEST) if name in names), asked.removesuffix(LATEST))


def now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")
