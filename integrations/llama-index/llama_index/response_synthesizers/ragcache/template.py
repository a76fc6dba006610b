"""Prompt templates whose context is filled with passages."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from llama_index.core.base.llms.types import ChatMessage, ContentBlock, TextBlock
from llama_index.core.prompts import BasePromptTemplate

import ragcache as rc
from llama_index.llms.ragcache import FusedPrompt, PassageBlock, RagCacheLLM
from ragcache.errors import ConfigError

Passages = Sequence[rc.Passage | rc.Hit]


def check_template(template: BasePromptTemplate, llm: RagCacheLLM) -> None:
    """Raise ConfigError for a template without {context_str} and {query_str}, or with the context twice."""
    mark, question = _mark(), _mark()
    text = template.format(llm=llm, context_str=mark, query_str=question)
    if text.count(mark) != 1:
        raise ConfigError(
            f"the prompt template has {text.count(mark)} places for the passages; write {{context_str}} into it once"
        )
    if question not in text:
        raise ConfigError("the prompt template has no place for the question; write {query_str} into it")


def fused_messages(
    template: BasePromptTemplate, llm: RagCacheLLM, passages: Passages, **variables: Any
) -> list[ChatMessage]:
    """Return the template's messages, with a block for each passage at the place of its context."""
    mark = _mark()
    messages = template.format_messages(llm=llm, context_str=mark, **variables)
    return [
        message.model_copy(
            update={"blocks": [one for block in message.blocks for one in _blocks(block, mark, passages)]}
        )
        for message in messages
    ]


def as_raw_prompt(message: ChatMessage, system: str | None) -> FusedPrompt:
    """Return a single message as a raw prompt, for a model without a chat template."""
    head = [f"{system}\n\n"] if system else []
    texts = (block for block in message.blocks if isinstance(block, TextBlock))
    return FusedPrompt([*head, *(one.passage() if isinstance(one, PassageBlock) else one.text for one in texts)])


def _blocks(block: ContentBlock, mark: str, passages: Passages) -> list[ContentBlock]:
    if not isinstance(block, TextBlock) or mark not in block.text:
        return [block]
    head, tail = block.text.split(mark)
    texts = [TextBlock(text=head)] if head else []
    rest = [TextBlock(text=tail)] if tail else []
    return [*texts, *(PassageBlock.of(passage) for passage in passages), *rest]


def _mark() -> str:
    """Return a random mark of private-use characters, new for every prompt, which no inserted text can contain."""
    return f"\ue001{uuid.uuid4().hex}\ue001"
