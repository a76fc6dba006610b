"""/v1/conversations/{id}/items: the items of a conversation."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import Field
from starlette.responses import Response

from ragcache.server.body import JsonRoute
from ragcache.server.http_errors import errors
from ragcache.server.wire import RequestModel
from ragcache_openai.api import Bounds, Caller, CallerParam, ListOf, absent
from ragcache_openai.conversations import Conversation, NewItems, find_conversation, shown
from ragcache_openai.items import ITEM, check_room, kept_items, records_of
from ragcache_openai.records import Record


class AddedItems(RequestModel):
    items: Annotated[NewItems, Field(min_length=1)]


router = APIRouter(route_class=JsonRoute, prefix="/v1/conversations", tags=["conversations"])


@router.post("/{id}/items", summary="Add messages to a conversation", responses=errors(400, 404, 413, 415, 507))
async def create_items(caller: CallerParam, id: str, asked: AddedItems) -> ListOf:
    await find_conversation(caller, id)
    items = kept_items(asked.items)
    await append(caller, id, items, "items")
    ends = (items[0]["id"], items[-1]["id"]) if items else (None, None)
    return ListOf(object="list", data=items, first_id=ends[0], last_id=ends[1], has_more=False)


@router.get("/{id}/items", summary="The items of a conversation", responses=errors(400, 404))
async def list_items(caller: CallerParam, id: str, bounds: Bounds) -> ListOf:
    await find_conversation(caller, id)
    return await caller.list(ITEM, lambda item: item.body, parent=id, **bounds)


@router.get(
    "/{id}/items/{item_id}", summary="One item", responses={200: {"content": {"application/json": {}}}, **errors(404)}
)
async def get_item(caller: CallerParam, id: str, item_id: str) -> Response:
    item = await _find_item(caller, id, item_id)
    return Response(json.dumps(item.body), media_type="application/json")


@router.delete("/{id}/items/{item_id}", summary="Delete an item", responses=errors(404))
async def delete_item(caller: CallerParam, id: str, item_id: str) -> Conversation:
    await _find_item(caller, id, item_id)
    await caller.read(caller.records.delete, [item_id])
    return shown(await find_conversation(caller, id))


async def _find_item(caller: Caller, conversation: str, id: str) -> Record:
    await find_conversation(caller, conversation)
    item = await caller.find(ITEM, id, "item", "item_id")
    if item.parent != conversation:
        raise absent("item", id, "item_id")
    return item


async def append(caller: Caller, conversation: str, items: Sequence[dict[str, Any]], param: str) -> None:
    """Append items to a conversation. Raises ApiError (400) if they do not fit."""
    records = records_of(caller, conversation, items)
    count, letters = await caller.read(caller.records.length, conversation)
    check_room(count + len(records), letters + sum(len(one.text) for one in records), param)
    await caller.read(caller.records.add, records)
