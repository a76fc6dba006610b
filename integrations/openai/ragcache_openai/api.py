"""Parts that all routes of this package share: ownership of objects, pages of lists, errors for absent objects."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from fastapi import Depends, FastAPI, Query
from pydantic import Field, JsonValue, StringConstraints
from starlette.requests import Request

from ragcache.server.http_errors import ApiError
from ragcache.server.service import Service, ServiceParam
from ragcache.server.wire import AnswerModel, Text
from ragcache_openai.records import Record, Records

T = TypeVar("T")
MOST_PAIRS = 16
Key = Annotated[Text, StringConstraints(min_length=1, max_length=64)]
ShortText = Annotated[Text, StringConstraints(max_length=512)]
Metadata = Annotated[dict[Key, ShortText], Field(max_length=MOST_PAIRS)]
Id = Annotated[Text, StringConstraints(min_length=1, max_length=256)]
Order = Literal["asc", "desc"]
Limit = Annotated[int, Query(ge=1, le=100)]
After = Annotated[str | None, Query(max_length=256, description="List what stands behind this object")]


def _bounds(limit: Limit = 20, order: Order = "desc", after: After = None) -> dict[str, Any]:
    return {"limit": limit, "order": order, "after": after}


Bounds = Annotated[dict[str, Any], Depends(_bounds)]
"""The requested page of a list."""


class Deleted(AnswerModel):
    id: str
    object: str
    deleted: Literal[True]


class ListOf(AnswerModel):
    """A page of a list. To get the next page, a client sends this page's `last_id` as `after`."""

    object: Literal["list"]
    data: list[dict[str, JsonValue]]
    first_id: str | None
    last_id: str | None
    has_more: bool


@dataclass
class SharedState:
    """The state that the routes share. work: set when files may be waiting to be indexed"""

    records: Records
    work: asyncio.Event


def shared_state(app: FastAPI) -> SharedState:
    """Return the application's state, made at the first use."""
    if not hasattr(app.state, "openai"):
        app.state.openai = SharedState(Records(app.state.service.kb.store.documents.database), asyncio.Event())
    state: SharedState = app.state.openai
    return state


@dataclass
class Caller(SharedState):
    """A request's access to the records of its API key.

    service: the server's service, as the request sees it
    owner:   identifies the API key in records
    """

    service: Service
    owner: str

    async def read(self, function: Callable[..., T], *args: Any, **options: Any) -> T:
        """Call a function that uses the database, in a thread, and return its result."""
        return await self.service.in_thread(lambda: function(*args, **options))

    async def find(self, kind: str, id: str, name: str, param: str | None = None, status: int = 404) -> Record:
        """Return an object. Raises ApiError if it does not exist or is another key's.

        name:   what the error calls the object: "file"
        param:  the request's parameter at fault
        status: of the error
        """
        record = await self.read(self.records.get, kind, self.owner, id)
        if record is None:
            raise absent(name, id, param, status)
        return record

    async def among(self, kind: str, ids: Sequence[str], name: str, param: str) -> list[Record]:
        """Return objects, in order of creation.

        Raises ApiError (404) for the first id that does not exist or is another key's; see `find`.
        """
        read = await self.read(self.records.among, ids)
        found = {one.id: one for one in read if (one.kind, one.owner) == (kind, self.owner)}
        for id in ids:
            if id not in found:
                raise absent(name, id, param)
        return list(found.values())

    async def list(self, kind: str, shown: Callable[[Record], dict[str, Any]], **wanted: Any) -> ListOf:
        """Return a page of a list.

        shown:  turns a record into the object that the client gets
        wanted: the arguments of `Records.page`, but `order` ("asc" or "desc", as in `Bounds`) instead of newest_first
        """
        newest_first = wanted.pop("order") == "desc"

        def read() -> tuple[list[dict[str, Any]], bool]:
            page = self.records.page(kind, self.owner, newest_first=newest_first, **wanted)
            return [shown(one) for one in page.records], page.has_more

        data, has_more = await self.read(read)
        ends = (data[0]["id"], data[-1]["id"]) if data else (None, None)
        return ListOf(object="list", data=data, first_id=ends[0], last_id=ends[1], has_more=has_more)


async def _caller(request: Request, service: ServiceParam) -> Caller:
    state = shared_state(request.app)
    return Caller(state.records, state.work, service, service.key.digest[:32])


CallerParam = Annotated[Caller, Depends(_caller)]
"""Type of a route's parameter that receives the `Caller` of the request."""


def absent(name: str, id: str, param: str | None = None, status: int = 404) -> ApiError:
    code = f"{name.replace(' ', '_')}_not_found"
    return ApiError(status, f"there is no {name} {id!r}, or it is not yours; it may have been deleted", code, param)
