"""Conversion of the engine's answers to LangChain's messages."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from langchain_core.messages import AIMessage, AIMessageChunk, InvalidToolCall, ToolCall
from langchain_core.messages.ai import InputTokenDetails, OutputTokenDetails, UsageMetadata
from langchain_core.messages.tool import invalid_tool_call, tool_call, tool_call_chunk
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult

import ragcache as rc

PROVIDER = "ragcache"


def to_result(answer: rc.Answer, model: str) -> ChatResult:
    valid, invalid = to_calls(answer.tool_calls)
    message = AIMessage(
        answer.text,
        additional_kwargs=_thoughts(answer.reasoning),
        tool_calls=valid,
        invalid_tool_calls=invalid,
        usage_metadata=to_usage(answer.usage),
        response_metadata=about(answer, model),
    )
    return ChatResult(generations=[ChatGeneration(message=message)])


def to_calls(calls: Sequence[rc.ToolCall]) -> tuple[list[ToolCall], list[InvalidToolCall]]:
    """Return the calls that can be executed, and those that cannot, with the text that the model wrote."""
    valid = [tool_call(name=one.name, args=json.loads(one.arguments), id=one.id) for one in calls if one.error is None]
    invalid = [
        invalid_tool_call(name=one.name or None, args=one.arguments, id=one.id, error=one.error)
        for one in calls
        if one.error is not None
    ]
    return valid, invalid


def _thoughts(text: str) -> dict[str, Any]:
    """Return reasoning in the field that LangChain reads (`content_blocks`)."""
    return {"reasoning_content": text} if text else {}


class ChunkWriter:
    """Writes an answer's events as chunks.

    LangChain adds chunks up, so only the last chunk has usage and metadata. It parses calls from the sum, and would
    complete an unreadable call to a different one, so the text of such a call is sent as a JSON string.
    """

    def __init__(self, model: str) -> None:
        self._model = model
        self._calls = 0

    def chunk(self, event: rc.Sources | rc.Reasoning | rc.Token | rc.ToolCall | rc.Done) -> ChatGenerationChunk | None:
        """Return a chunk with text, a call, or at the end usage and metadata of the answer; None for an event without
        content.
        """
        if isinstance(event, rc.Token):
            return ChatGenerationChunk(message=AIMessageChunk(content=event.text))
        if isinstance(event, rc.Reasoning):
            return ChatGenerationChunk(message=AIMessageChunk(content="", additional_kwargs=_thoughts(event.text)))
        if isinstance(event, rc.ToolCall):
            return ChatGenerationChunk(message=self._call(event))
        return ChatGenerationChunk(message=self._last(event.answer)) if isinstance(event, rc.Done) else None

    def _call(self, call: rc.ToolCall) -> AIMessageChunk:
        args = call.arguments if call.error is None else json.dumps(call.arguments, ensure_ascii=False)
        piece = tool_call_chunk(name=call.name, args=args, id=call.id, index=self._calls)
        self._calls += 1
        return AIMessageChunk(content="", tool_call_chunks=[piece])

    def _last(self, answer: rc.Answer) -> AIMessageChunk:
        return AIMessageChunk(
            content="",
            usage_metadata=to_usage(answer.usage),
            response_metadata=about(answer, self._model),
            chunk_position="last",
        )


def to_usage(usage: rc.Usage) -> UsageMetadata:
    """Return the usage: `cache_read` are the engine's cached tokens, `cache_creation` its created ones."""
    return UsageMetadata(
        input_tokens=usage.prompt_tokens,
        output_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        input_token_details=InputTokenDetails(cache_read=usage.cached_tokens, cache_creation=usage.created_tokens),
        output_token_details=OutputTokenDetails(reasoning=usage.reasoning_tokens),
    )


def about(answer: rc.Answer, model: str) -> dict[str, Any]:
    """Return the response metadata, all JSON: passages with score, handle and origin of KV, and times in seconds."""
    known = answer.to_json()
    scores = {} if answer.logprobs is None else {"logprobs": {"content": known["logprobs"]}}
    return {
        **scores,
        "model_name": model,
        "model_provider": PROVIDER,
        "finish_reason": answer.finish_reason,
        "method": answer.method,
        "method_reason": answer.method_reason,
        "dropped": answer.dropped,
        "dropped_turns": answer.dropped_turns,
        "computed_tokens": answer.usage.computed_tokens,
        "timings": known["timings"],
        "sources": known["hits"],
    }
