"""Prompts with a place for documents, which is filled with content blocks."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from langchain_core.documents import Document
from langchain_core.messages import BaseMessage
from langchain_core.prompts import BasePromptTemplate, format_document
from langchain_core.runnables import RunnableConfig

from langchain_ragcache.messages import document_block
from ragcache.errors import ConfigError, PromptError


class Around:
    """Text around documents: the text that a document prompt writes before and after each, and the separator.

    Raises ConfigError for a document prompt that is not text, or does not have {page_content} exactly once.
    """

    def __init__(self, document_prompt: BasePromptTemplate[Any], separator: str) -> None:
        self._prompt = document_prompt
        self._separator = separator if separator.strip() else ""
        wanted = set(document_prompt.input_variables) - {"page_content"}
        self.halves(Document("", metadata=dict.fromkeys(wanted, "")))

    def halves(self, document: Document) -> tuple[str, str]:
        """Return the text before and after a document. Raises ValueError for a document that lacks metadata of the
        prompt.
        """
        mark = _mark()
        written = format_document(Document(mark, metadata=document.metadata), self._prompt)
        if not isinstance(written, str) or written.count(mark) != 1:
            raise ConfigError(
                "document_prompt has to write {page_content} once, as it is: the passage's KV is of it alone"
            )
        before, behind = written.split(mark)
        return before, behind

    def texts(self, documents: Sequence[Document]) -> list[str]:
        """Return the text before each document, and the text after the last."""
        halves = [self.halves(document) for document in documents]
        between = [f"{behind}{self._separator}{before}" for (_, behind), (before, _) in pairwise(halves)]
        return [halves[0][0], *between, halves[-1][1]] if halves else [""]


class FusedPrompt:
    """A prompt whose messages get a block for every document at `variable`.

    around: text around the documents

    The prompt is formatted with a random mark in that place, so that no user's text can match it. Raises PromptError if
    the input has no documents or the prompt has no single place for them.
    """

    def __init__(self, prompt: BasePromptTemplate[Any], variable: str, around: Around) -> None:
        self.prompt = prompt
        self.variable = variable
        self.around = around

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
        first, *texts = self.around.texts(documents)
        pairs = zip((dict(document_block(one)) for one in documents), texts, strict=True) if documents else ()
        blocks = [*_block_of(first), *(block for one, text in pairs for block in (one, *_block_of(text)))]
        return [_with_blocks(message, mark, blocks) for message in messages]


def _block_of(text: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text}] if text else []


def _with_blocks(message: BaseMessage, mark: str, blocks: list[dict[str, Any]]) -> BaseMessage:
    parts = _parts(message)
    place = next((place for place, part in enumerate(parts) if mark in _text(part)), None)
    if place is None:
        return message
    head, tail = map(_block_of, _text(parts[place]).split(mark))
    return message.model_copy(update={"content": [*parts[:place], *head, *blocks, *tail, *parts[place + 1 :]]})


def _parts(message: BaseMessage) -> list[str | dict[Any, Any]]:
    return [message.content] if isinstance(message.content, str) else list(message.content)


def _text(part: str | dict[Any, Any]) -> str:
    text = part if isinstance(part, str) else part.get("text")
    return text if isinstance(text, str) else ""


def _mark() -> str:
    return f"documents{uuid.uuid4().hex}"
