"""A prompt with a place for documents, filled with content blocks."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from langchain_core.documents import Document
from langchain_core.messages import BaseMessage
from langchain_core.prompts import BasePromptTemplate
from langchain_core.runnables import RunnableConfig

from langchain_ragcache.messages import document_block
from ragcache.errors import PromptError


class FusedPrompt:
    """Messages of a prompt, with a block for every document in the place of `variable`.

    as_passages: blocks say that they are passages; otherwise they are plain text

    The prompt is formatted with a mark in that place, made anew each time: nothing that a user writes can be it.
    Raises PromptError: no documents in the input, or no single place for them in the prompt.
    """

    def __init__(self, prompt: BasePromptTemplate[Any], variable: str, *, as_passages: bool) -> None:
        self.prompt = prompt
        self.variable = variable
        self.as_passages = as_passages

    def invoke(self, inputs: dict[str, Any], config: RunnableConfig) -> list[BaseMessage]:
        documents, mark = self._documents(inputs), _mark()
        value = self.prompt.invoke({**inputs, self.variable: mark}, config)
        return self._filled(value.to_messages(), mark, documents)

    async def ainvoke(self, inputs: dict[str, Any], config: RunnableConfig) -> list[BaseMessage]:
        documents, mark = self._documents(inputs), _mark()
        value = await self.prompt.ainvoke({**inputs, self.variable: mark}, config)
        return self._filled(value.to_messages(), mark, documents)

    def _documents(self, inputs: Any) -> Sequence[Document]:
        found = inputs.get(self.variable) if isinstance(inputs, Mapping) else None
        if not isinstance(found, Sequence) or not all(isinstance(one, Document) for one in found):
            raise PromptError(f"the input has no documents: a list of them is expected under {self.variable!r}")
        return found

    def _filled(self, messages: list[BaseMessage], mark: str, documents: Sequence[Document]) -> list[BaseMessage]:
        places = sum(_text(part).count(mark) for message in messages for part in _parts(message))
        if places != 1:
            raise PromptError(
                f"the prompt has {places} places for {{{self.variable}}} in the text of its messages; write it once"
            )
        blocks = [self._block(document) for document in documents]
        return [_with_blocks(message, mark, blocks) for message in messages]

    def _block(self, document: Document) -> dict[str, Any]:
        if self.as_passages:
            return dict(document_block(document))
        return {"type": "text", "text": f"{document.page_content.rstrip()}\n"}


def _with_blocks(message: BaseMessage, mark: str, blocks: list[dict[str, Any]]) -> BaseMessage:
    parts = _parts(message)
    place = next((place for place, part in enumerate(parts) if mark in _text(part)), None)
    if place is None:
        return message
    head, tail = ([{"type": "text", "text": text}] if text else [] for text in _text(parts[place]).split(mark))
    return message.model_copy(update={"content": [*parts[:place], *head, *blocks, *tail, *parts[place + 1 :]]})


def _parts(message: BaseMessage) -> list[str | dict[Any, Any]]:
    return [message.content] if isinstance(message.content, str) else list(message.content)


def _text(part: str | dict[Any, Any]) -> str:
    text = part if isinstance(part, str) else part.get("text")
    return text if isinstance(text, str) else ""


def _mark() -> str:
    return f"documents{uuid.uuid4().hex}"
