"""Conversion of LangChain's messages to the engine's, and of documents to content blocks.

A passage is a text block whose extras hold {"ragcache": {...}}, as made by `document_block` or `create_text_block(text,
id=..., ragcache={"handle": ...})`. Documents that are the artifact of a tool message are passages too, and replace its
text. Any other text is prompt.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from langchain_core.documents import Document
from langchain_core.messages import AIMessage, BaseMessage, ChatMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.messages.content import TextContentBlock, create_text_block

import ragcache as rc
from langchain_ragcache.documents import HANDLE_KEY
from ragcache.errors import PromptError

KEY = "ragcache"
PASSAGE_KEYS = {"handle", "score", "metadata"}
ROLES = {SystemMessage: "system", HumanMessage: "user", AIMessage: "assistant", ToolMessage: "tool"}
# Blocks that are not text of the conversation: calls, which `tool_calls` and `invalid_tool_calls` hold too, and
# reasoning, which chat templates leave out of earlier turns.
READ_OVER = (
    "tool_call", "tool_call_chunk", "invalid_tool_call", "tool_use", "function_call", "reasoning", "reasoning_content",
    "thinking", "redacted_thinking",
)  # fmt: skip


def document_block(document: Document) -> TextContentBlock:
    """Return a document as a content block that `ChatRagCache` reads as a passage. Without a handle its KV is found by
    its text, or computed.
    """
    handle = document.metadata.get(HANDLE_KEY)
    block = create_text_block(document.page_content, id=document.id, ragcache={"handle": handle} if handle else {})
    if document.id is None:
        del block["id"]  # a random id would keep any cache of answers from finding the prompt again
    return block


def to_engine(messages: Sequence[BaseMessage]) -> list[dict[str, Any]]:
    """Return messages in the form of `rc.RagCache.chat`. Raises PromptError naming the part that it cannot read."""
    return [{"role": _role(message), "content": _content(message), **_tools(message)} for message in messages]


def _role(message: BaseMessage) -> str:
    if isinstance(message, ChatMessage):
        return "system" if message.role == "developer" else message.role
    role = next((role for kind, role in ROLES.items() if isinstance(message, kind)), None)
    if role is None:
        raise PromptError(
            f"a {type(message).__name__} cannot be read; messages are a system's, a user's, an assistant's or a tool's"
        )
    return role


def _tools(message: BaseMessage) -> dict[str, Any]:
    """Return the calls of an answer, or the call that a tool message answers."""
    if isinstance(message, ToolMessage):
        return {"tool_call_id": message.tool_call_id, "name": message.name or ""}
    if not isinstance(message, AIMessage):
        return {}
    calls = [(one["id"], one["name"], json.dumps(one["args"], ensure_ascii=False)) for one in message.tool_calls]
    calls += [(one["id"], one["name"] or "", one["args"] or "") for one in message.invalid_tool_calls]
    return {"tool_calls": [rc.ToolCall(id or "", name, arguments) for id, name, arguments in calls]}


def _content(message: BaseMessage) -> str | list[str | rc.Passage]:
    if isinstance(message, ToolMessage) and (found := _found(message.artifact)):
        return found
    if isinstance(message.content, str):
        return message.content
    blocks = [block for block in message.content if isinstance(block, str) or _type(block) not in READ_OVER]
    return [block if isinstance(block, str) else _part(block) for block in blocks]


def _type(block: Mapping[str, Any]) -> Any:
    """Return a block's type: a provider's own type if LangChain has none."""
    own = block.get("value")
    return own.get("type") if block.get("type") == "non_standard" and isinstance(own, Mapping) else block.get("type")


def _found(artifact: Any) -> list[str | rc.Passage]:
    """Return the passages of a retriever tool, if all are of a store: the message's text repeats them."""
    documents = artifact if isinstance(artifact, list) else []
    if not documents or not all(isinstance(one, Document) and HANDLE_KEY in one.metadata for one in documents):
        return []
    return [_part(document_block(document)) for document in documents]


def _part(block: Mapping[str, Any]) -> str | rc.Passage:
    """Return a block as text or passage. Raises PromptError.

    block: in LangChain's standard form, with keys that it does not know in "extras", or in a provider's form
    """
    if block.get("type") != "text" or not isinstance(block.get("text"), str):
        raise PromptError(f"a content block of type {block.get('type')!r} cannot be read; this model reads text only")
    extras = block.get("extras")
    about = extras.get(KEY) if isinstance(extras, Mapping) else None
    about = block.get(KEY) if about is None else about
    text = str(block["text"])
    return text if about is None else _passage(text, block.get("id"), about)


def _passage(text: str, id: Any, about: Any) -> rc.Passage:
    if not isinstance(about, Mapping) or set(about) - PASSAGE_KEYS:
        raise PromptError(f"{KEY}={about!r} of a content block: an object of {sorted(PASSAGE_KEYS)} is expected")
    handle, score, metadata = about.get("handle"), about.get("score"), about.get("metadata") or {}
    if not isinstance(handle, str | None) or not isinstance(score, float | int | None):
        raise PromptError(f"{KEY}={dict(about)!r} of a content block: the handle is a string, the score a number")
    if not isinstance(metadata, Mapping):
        raise PromptError(f"{KEY}={dict(about)!r} of a content block: metadata is an object")
    return rc.Passage(text, id if isinstance(id, str) else None, handle, score, dict(metadata))
