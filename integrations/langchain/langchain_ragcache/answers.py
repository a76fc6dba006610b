"""The engine's answers as LangChain's messages."""

from __future__ import annotations

from typing import Any

from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult

import ragcache as rc

PROVIDER = "ragcache"


def to_result(answer: rc.Answer, model: str) -> ChatResult:
    message = AIMessage(answer.text, usage_metadata=to_usage(answer.usage), response_metadata=about(answer, model))
    return ChatResult(generations=[ChatGeneration(message=message)])


def to_chunk(event: rc.Sources | rc.Token | rc.ToolCall | rc.Done, model: str) -> ChatGenerationChunk | None:
    """A piece of text, or at the end what is known about the whole; None where there is nothing to say.

    Usage and metadata are in the last chunk alone: chunks are added up.
    """
    if isinstance(event, rc.Token):
        return ChatGenerationChunk(message=AIMessageChunk(content=event.text))
    if not isinstance(event, rc.Done):
        return None
    last = AIMessageChunk(
        content="",
        usage_metadata=to_usage(event.answer.usage),
        response_metadata=about(event.answer, model),
        chunk_position="last",
    )
    return ChatGenerationChunk(message=last)


def to_usage(usage: rc.Usage) -> UsageMetadata:
    """cache_read: tokens whose KV was reused. cache_creation: tokens of passages whose KV was computed just now."""
    return UsageMetadata(
        input_tokens=usage.prompt_tokens,
        output_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        input_token_details=InputTokenDetails(cache_read=usage.cached_tokens, cache_creation=usage.created_tokens),
    )


def about(answer: rc.Answer, model: str) -> dict[str, Any]:
    """Response metadata, all JSON: the passages with score, handle and where their KV came from; times in seconds."""
    known = answer.to_json()
    return {
        "model_name": model,
        "model_provider": PROVIDER,
        "finish_reason": answer.finish_reason,
        "method": answer.method,
        "dropped": answer.dropped,
        "computed_tokens": answer.usage.computed_tokens,
        "timings": known["timings"],
        "sources": known["hits"],
    }
