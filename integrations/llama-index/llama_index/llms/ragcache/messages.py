"""Conversion of chat messages to the engine's."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from llama_index.core.base.llms.types import ChatMessage, MessageRole, TextBlock, ThinkingBlock, ToolCallBlock

import ragcache as rc
from llama_index.llms.ragcache.segments import PassageBlock
from ragcache.errors import PromptError

_ROLES = {
    MessageRole.SYSTEM: "system",
    MessageRole.DEVELOPER: "system",
    MessageRole.USER: "user",
    MessageRole.ASSISTANT: "assistant",
    MessageRole.CHATBOT: "assistant",
    MessageRole.MODEL: "assistant",
    MessageRole.TOOL: "tool",
}


def to_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Return the messages for the engine. Raises PromptError naming a message with a role or a block that this
    model cannot read.
    """
    return [
        {"role": _role(rank, message), "content": _content(rank, message), **_tools(message)}
        for rank, message in enumerate(messages)
    ]


def _role(rank: int, message: ChatMessage) -> str:
    if message.role not in _ROLES:
        raise PromptError(
            f"message {rank} has the role {message.role.value!r}; this model knows system, user, assistant and tool"
        )
    return _ROLES[message.role]


def _tools(message: ChatMessage) -> dict[str, Any]:
    """Return the calls of an answer, or the call that a tool message answers."""
    if message.role == MessageRole.TOOL:
        about = message.additional_kwargs
        return {"tool_call_id": about.get("tool_call_id"), "name": about.get("name")}
    blocks = [block for block in message.blocks if isinstance(block, ToolCallBlock)]
    return {"tool_calls": [_call(block) for block in blocks]}


def _call(block: ToolCallBlock) -> rc.ToolCall:
    given = block.tool_kwargs
    arguments = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
    return rc.ToolCall(block.tool_call_id or "", block.tool_name, arguments)


def _content(rank: int, message: ChatMessage) -> str | list[str | rc.Passage]:
    # Reasoning is skipped, as chat templates leave it out of earlier turns.
    known = TextBlock | ToolCallBlock | ThinkingBlock
    other = next((block for block in message.blocks if not isinstance(block, known)), None)
    if other is not None:
        raise PromptError(f"message {rank} holds a block of type {other.block_type!r}; this model reads text only")
    if not any(isinstance(block, PassageBlock) for block in message.blocks):
        return message.content or ""
    return [
        block.passage() if isinstance(block, PassageBlock) else block.text
        for block in message.blocks
        if isinstance(block, TextBlock)
    ]
