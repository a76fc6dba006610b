"""LangChain's messages as the engine's, and documents as content blocks.

A passage is a text block whose extras hold {"ragcache": {...}}: what `document_block` makes, and
`create_text_block(text, id=..., ragcache={"handle": ...})`. Any other text is prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from langchain_core.documents import Document
from langchain_core.messages import AIMessage, BaseMessage, ChatMessage, HumanMessage, SystemMessage
from langchain_core.messages.content import TextContentBlock, create_text_block

import ragcache as rc
from langchain_ragcache.documents import HANDLE_KEY
from ragcache.errors import PromptError

KEY = "ragcache"
PASSAGE_KEYS = {"handle", "score", "metadata"}
ROLES = {SystemMessage: "system", HumanMessage: "user", AIMessage: "assistant"}


def document_block(document: Document) -> TextContentBlock:
    """A document as a content block that `ChatRagCache` reads as a passage. Without a handle its KV is found by its
    text, or computed."""
    handle = document.metadata.get(HANDLE_KEY)
    block = create_text_block(document.page_content, id=document.id, ragcache={"handle": handle} if handle else {})
    if document.id is None:
        del block["id"]  # a new one every time: no cache of answers would find its prompt again
    return block


def to_engine(messages: Sequence[BaseMessage]) -> list[dict[str, Any]]:
    """Messages as `rc.RagCache.chat` takes them. Raises PromptError naming what it cannot read."""
    return [{"role": _role(message), "content": _content(message)} for message in messages]


def _role(message: BaseMessage) -> str:
    if isinstance(message, ChatMessage):
        return message.role
    role = next((role for kind, role in ROLES.items() if isinstance(message, kind)), None)
    if role is None:
        raise PromptError(
            f"a {type(message).__name__} cannot be read: there are no tools here; hand the documents of a retriever "
            "tool (the message's artifact) to create_fused_documents_chain"
        )
    return role


def _content(message: BaseMessage) -> str | list[str | rc.Passage]:
    if getattr(message, "tool_calls", None):
        raise PromptError("a message with tool calls cannot be read: there are no tools here; leave it out")
    if isinstance(message.content, str):
        return message.content
    return [block if isinstance(block, str) else _part(block) for block in message.content]


def _part(block: Mapping[str, Any]) -> str | rc.Passage:
    """block: of LangChain's standard form, whose other keys are in "extras", or of a provider's, where they are not."""
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
