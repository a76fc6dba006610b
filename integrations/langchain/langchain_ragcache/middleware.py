"""Middleware for LangChain's agents."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from langchain.agents.middleware import AgentMiddleware
from langchain_core.documents import Document
from langchain_core.messages import ToolMessage

import ragcache as rc
from langchain_ragcache.attachment import with_handles
from ragcache.errors import RagCacheError

log = logging.getLogger(__name__)
# Shorter texts are computed as fast as they are looked up.
LEAST_CHARACTERS = 100


class RagCacheMiddleware(AgentMiddleware[Any, Any, Any]):
    """Middleware that keeps the KV of an agent's tool results: `create_agent(ChatRagCache(kb=kb), tools,
    middleware=[...])`.

    Documents that a tool returns as its artifact are precomputed and get handles, so that `ChatRagCache` reads each
    from its KV, in this conversation and in any other. For the tools in `text_of` the text itself is precomputed, split
    at `separator`.

    kb:        an open `rc.RagCache`, or the path of a store (`rc.open_shared`)
    text_of:   names of tools whose results are passages in plain text
    separator: between the passages of such a result

    A failure to keep KV is logged and does not stop the agent. A kb whose method reads no blocks is left unchanged.
    """

    def __init__(self, kb: rc.RagCache | str | Path, *, text_of: Sequence[str] = (), separator: str = "\n\n") -> None:
        super().__init__()
        self.kb = rc.open_shared(kb)
        self.text_of = frozenset(text_of)
        self.separator = separator

    def wrap_tool_call(self, request: Any, handler: Callable[[Any], Any]) -> Any:
        return self._learn(handler(request))

    async def awrap_tool_call(self, request: Any, handler: Callable[[Any], Awaitable[Any]]) -> Any:
        return await asyncio.to_thread(self._learn, await handler(request))

    def _learn(self, result: Any) -> Any:
        """Return the result, with handles in its documents; a Command or a failed call is returned as it is."""
        if not isinstance(result, ToolMessage) or result.status == "error" or not self.kb.reads_blocks:
            return result
        try:
            return self._learnt(result)
        except RagCacheError as error:
            log.warning("KV of what %s returned is not kept (%s)", result.name, error)
            return result

    def _learnt(self, result: ToolMessage) -> ToolMessage:
        found = result.artifact if isinstance(result.artifact, list) else []
        if found and all(isinstance(one, Document) and one.page_content.strip() for one in found):
            named = with_handles(found, self.kb.precompute([one.page_content for one in found]).handles)
            return result.model_copy(update={"artifact": named})
        if result.name in self.text_of:
            parts = result.text.split(self.separator) if self.separator else [result.text]
            self.kb.precompute([part for part in parts if len(part) >= LEAST_CHARACTERS])
        return result
