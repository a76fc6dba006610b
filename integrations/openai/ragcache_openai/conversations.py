"""/v1/conversations: conversations that the server keeps, searches and exports."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Annotated, Literal

from fastapi import APIRouter, Query
from pydantic import Field
from starlette.responses import Response, StreamingResponse

from ragcache.server.body import JsonRoute
from ragcache.server.http_errors import ApiError, errors
from ragcache.server.wire import AnswerModel, RequestModel
from ragcache_openai.api import Bounds, Caller, CallerParam, Deleted, ListOf, Metadata
from ragcache_openai.items import CONVERSATION, ITEM, InputItem, kept_items, records_of
from ragcache_openai.records import Record, new_id

MOST_AT_ONCE = 20
MOST_WORDS = 32
PAGE = 100

NewItems = Annotated[list[InputItem], Field(max_length=MOST_AT_ONCE)]


class NewConversation(RequestModel):
    items: NewItems | None = None
    metadata: Metadata | None = None


class ConversationChange(RequestModel):
    metadata: Metadata


class Conversation(AnswerModel):
    id: str
    object: Literal["conversation"]
    created_at: int
    metadata: dict[str, str]


router = APIRouter(route_class=JsonRoute, prefix="/v1/conversations", tags=["conversations"])


@router.post("", summary="Begin a conversation", responses=errors(400, 413, 415, 507))
async def create_conversation(caller: CallerParam, asked: NewConversation) -> Conversation:
    made = Record(new_id("conv_"), CONVERSATION, caller.owner, {"metadata": asked.metadata or {}})
    items = records_of(caller, made.id, kept_items(asked.items or ()))
    return shown((await caller.read(caller.records.add, [made, *items]))[0])


@router.get("", summary="The conversations of this key", responses=errors(400))
async def list_conversations(caller: CallerParam, bounds: Bounds) -> ListOf:
    return await caller.list(CONVERSATION, lambda one: shown(one).model_dump(), **bounds)


@router.get(
    "/search",
    summary="Items that hold all of these words, the newest first, each with its conversation's id",
    responses=errors(400),
)
async def search_items(
    caller: CallerParam, query: Annotated[str, Query(min_length=1, max_length=1000)], bounds: Bounds
) -> ListOf:
    words = query.casefold().split()
    if not 1 <= len(words) <= MOST_WORDS:
        raise ApiError(400, f"search for 1 to {MOST_WORDS} words", "invalid_value", "query")
    wanted = {**bounds, "words": words, "any_parent": True}
    return await caller.list(ITEM, lambda item: {**item.body, "conversation_id": item.parent}, **wanted)


@router.get("/{id}", summary="One conversation", responses=errors(404))
async def get_conversation(caller: CallerParam, id: str) -> Conversation:
    return shown(await find_conversation(caller, id))


@router.post("/{id}", summary="Change a conversation's metadata", responses=errors(400, 404, 413, 415))
async def change_conversation(caller: CallerParam, id: str, asked: ConversationChange) -> Conversation:
    found = await find_conversation(caller, id)
    body = {"metadata": asked.metadata}
    await caller.read(caller.records.change, found.id, body)
    return shown(found._replace(body=body))


@router.delete("/{id}", summary="Delete a conversation and its items", responses=errors(404))
async def delete_conversation(caller: CallerParam, id: str) -> Deleted:
    await find_conversation(caller, id)
    await caller.read(caller.records.delete, [id])
    return Deleted(id=id, object="conversation.deleted", deleted=True)


@router.get(
    "/{id}/export",
    summary="A conversation with all of its items, the oldest first, as a JSON file",
    responses={200: {"content": {"application/json": {}}}, **errors(404)},
)
async def export_conversation(caller: CallerParam, id: str) -> Response:
    found = await find_conversation(caller, id)
    headers = {"Content-Disposition": f'attachment; filename="{found.id}.json"'}
    return StreamingResponse(_export(caller, found), headers=headers, media_type="application/json")


async def _export(caller: Caller, conversation: Record) -> AsyncIterator[str]:
    head = json.dumps(shown(conversation).model_dump(), ensure_ascii=False)
    yield f'{head[:-1]}, "items": ['
    after, comma, more = None, "", True
    while more:
        bounds = {"parent": conversation.id, "limit": PAGE, "newest_first": False, "after": after}
        records, more = await caller.read(caller.records.page, ITEM, caller.owner, **bounds)
        for item in records:
            yield comma + json.dumps(item.body, ensure_ascii=False)
            comma, after = ",\n", item.id
    yield "]}\n"


async def find_conversation(caller: Caller, id: str, param: str = "conversation_id") -> Record:
    return await caller.find(CONVERSATION, id, "conversation", param)


def shown(conversation: Record) -> Conversation:
    return Conversation(
        id=conversation.id,
        object="conversation",
        created_at=int(conversation.created_at),
        metadata=conversation.body["metadata"],
    )
