"""Types that all request and response bodies share."""

from __future__ import annotations

import math
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, JsonValue, StringConstraints
from starlette.responses import Response

MAX_DEPTH = 32
INT64 = 2**63


class RequestModel(BaseModel):
    """A request body, or a part of one. Types are strict: a string is no number.

    Unknown fields are accepted here, so that `read_json` can warn of them and drop them, or refuse them by name.
    """

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)


class LooseModel(BaseModel):
    """A part of a request body in which clients may have their own fields, which are left alone. Types are strict."""

    model_config = ConfigDict(extra="allow", strict=True)


class AnswerModel(BaseModel):
    """A response body, or a part of one. Fields that were not set are left out of its JSON."""

    model_config = ConfigDict(extra="forbid")

    @classmethod
    def of(cls, found: object, **given: Any) -> Self:
        """Return a model with the given fields, and with attributes of `found` for the other fields, if it has them."""
        own = {name: getattr(found, name) for name in cls.model_fields if name not in given and hasattr(found, name)}
        return cls(**own, **given)

    def to_json(self) -> str:
        return self.model_dump_json(exclude_unset=True)

    def to_response(self) -> Response:
        return Response(self.to_json(), media_type="application/json")


def _without_nul(text: str) -> str:
    if "\0" in text:
        raise ValueError("it holds a NUL character; remove it")
    return text


def _plain(value: Any, depth: int = 0) -> Any:
    """Return the value. Raises ValueError for values that a store or method cannot hold: NUL, numbers beyond 64 bits,
    deep nesting.
    """
    if depth > MAX_DEPTH:
        raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels")
    if isinstance(value, str):
        _without_nul(value)
    elif isinstance(value, dict):
        for name, item in value.items():
            _plain(name, depth + 1)
            _plain(item, depth + 1)
    elif isinstance(value, list):
        for item in value:
            _plain(item, depth + 1)
    elif isinstance(value, int) and not -INT64 <= value < INT64:
        raise ValueError("it holds a number of more than 64 bits")
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError("it holds a number that is not finite")
    return value


Text = Annotated[str, AfterValidator(_without_nul)]
Name = Annotated[str, StringConstraints(min_length=1, max_length=1024), AfterValidator(_without_nul)]
# Checked before pydantic walks it, which must not meet too deep a nesting.
JsonObject = Annotated[dict[str, JsonValue], BeforeValidator(_plain)]
