"""A response synthesizer that answers over nodes by fused prefill, inside any LlamaIndex query engine."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, Generator, Iterable, Sequence
from typing import Any, NamedTuple

from llama_index.core.base.llms.types import ChatMessage, ChatResponse, CompletionResponse, MessageRole
from llama_index.core.base.response.schema import RESPONSE_TYPE
from llama_index.core.callbacks.base import CallbackManager
from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.prompts.mixin import PromptDictType
from llama_index.core.response_synthesizers.base import BaseSynthesizer
from llama_index.core.schema import MetadataMode, NodeWithScore, QueryType
from llama_index.core.settings import Settings
from llama_index.core.types import RESPONSE_TEXT_TYPE

import ragcache as rc
from llama_index.llms.ragcache import FusedPrompt, RagCacheLLM
from llama_index.llms.ragcache.segments import as_passage
from llama_index.response_synthesizers.ragcache.template import as_raw_prompt, check_template, fused_messages
from ragcache.errors import ConfigError, PromptError

__all__ = ["FusedSynthesizer"]


class _Chat(NamedTuple):
    """Messages, and passages to put before the last user message."""

    messages: list[ChatMessage]
    segments: list[rc.Passage | rc.Hit]


class FusedSynthesizer(BaseSynthesizer):
    """A synthesizer that reuses the KV of nodes.

    LlamaIndex's own synthesizers join nodes to a string before the model sees them, and a joined text has no KV to
    reuse. This class passes each node to the model as a passage. The node's text is always read, and its handle is a
    hint: if a postprocessor changed the text, the changed text is read.
    """

    def __init__(
        self,
        llm: RagCacheLLM | None = None,
        *,
        text_qa_template: BasePromptTemplate | None = None,
        history: Sequence[ChatMessage] = (),
        metadata_mode: MetadataMode = MetadataMode.NONE,
        streaming: bool = False,
        empty_response: str | None = None,
        callback_manager: CallbackManager | None = None,
    ) -> None:
        """Make a synthesizer.

        llm: has to be a RagCacheLLM; None: `Settings.llm`
        text_qa_template: a prompt with {context_str} and {query_str}; None: the store's own prompt, as in `kb.ask`
        history:          earlier turns, beginning with a system message if any; put unchanged before the question
        metadata_mode:    the part of a node's metadata that is read with its text. A store keeps the KV for NONE; other
                          modes make another text, whose KV is computed at first use
        empty_response:   the answer if there are no nodes

        Raises ConfigError for another kind of model, and for a template that lacks a place.
        """
        chosen = llm or Settings.llm
        if not isinstance(chosen, RagCacheLLM):
            raise ConfigError(
                f"FusedSynthesizer needs a RagCacheLLM, not {type(chosen).__name__}: other models take no passages"
            )
        super().__init__(
            llm=chosen, callback_manager=callback_manager, streaming=streaming, empty_response=empty_response
        )
        self._model = chosen
        self._history = list(history)
        self._metadata_mode = metadata_mode
        self._text_qa_template = text_qa_template
        self._check()

    def _get_prompts(self) -> PromptDictType:
        return {} if self._text_qa_template is None else {"text_qa_template": self._text_qa_template}

    def _update_prompts(self, prompts: PromptDictType) -> None:
        if "text_qa_template" in prompts:
            self._text_qa_template = prompts["text_qa_template"]
            self._check()

    def _check(self) -> None:
        if self._text_qa_template is not None:
            check_template(self._text_qa_template, self._model)

    def synthesize(
        self,
        query: QueryType,
        nodes: list[NodeWithScore],
        additional_source_nodes: Sequence[NodeWithScore] | None = None,
        **response_kwargs: Any,
    ) -> RESPONSE_TYPE:
        """Answer a query from nodes. response_kwargs: values of the template's other variables

        Raises PromptError for a value that is not a node.
        """
        check_nodes(nodes)
        return super().synthesize(query, nodes, additional_source_nodes, fused_nodes=list(nodes), **response_kwargs)

    async def asynthesize(
        self,
        query: QueryType,
        nodes: list[NodeWithScore],
        additional_source_nodes: Sequence[NodeWithScore] | None = None,
        **response_kwargs: Any,
    ) -> RESPONSE_TYPE:
        check_nodes(nodes)
        return await super().asynthesize(
            query, nodes, additional_source_nodes, fused_nodes=list(nodes), **response_kwargs
        )

    def get_response(self, query_str: str, text_chunks: Sequence[str], **response_kwargs: Any) -> RESPONSE_TEXT_TYPE:
        """Return the answer's text, or a generator of its pieces. text_chunks are read if no nodes were passed."""
        prompt = self._prompt(query_str, text_chunks, **response_kwargs)
        if isinstance(prompt, FusedPrompt):
            if self._streaming:
                return _pieces(self._model.stream_complete(prompt, formatted=True))
            return self._model.complete(prompt, formatted=True).text or self._empty_response
        if self._streaming:
            return _pieces(self._model.stream_chat(prompt.messages, segments=prompt.segments))
        return self._model.chat(prompt.messages, segments=prompt.segments).message.content or self._empty_response

    async def aget_response(
        self, query_str: str, text_chunks: Sequence[str], **response_kwargs: Any
    ) -> RESPONSE_TEXT_TYPE:
        prompt = self._prompt(query_str, text_chunks, **response_kwargs)
        if isinstance(prompt, FusedPrompt):
            if self._streaming:
                return _apieces(await self._model.astream_complete(prompt, formatted=True))
            return (await self._model.acomplete(prompt, formatted=True)).text or self._empty_response
        if self._streaming:
            return _apieces(await self._model.astream_chat(prompt.messages, segments=prompt.segments))
        answer = await self._model.achat(prompt.messages, segments=prompt.segments)
        return answer.message.content or self._empty_response

    def _prompt(
        self,
        query_str: str,
        text_chunks: Sequence[str],
        fused_nodes: Sequence[NodeWithScore] | None = None,
        **variables: Any,
    ) -> FusedPrompt | _Chat:
        given = text_chunks if fused_nodes is None else fused_nodes
        passages = [as_passage(one, self._metadata_mode) for one in given]
        template, system = self._text_qa_template, self._model.system_prompt
        if template is None:
            question = ChatMessage(role=MessageRole.USER, content=query_str)
            return _Chat(_with_system(system, [*self._history, question]), passages)
        variables["query_str"] = query_str
        messages = _behind_system(fused_messages(template, self._model, passages, **variables), self._history)
        if len(messages) == 1 and not self._model.metadata.is_chat_model:
            return as_raw_prompt(messages[0], system)
        return _Chat(_with_system(system, messages), [])


def check_nodes(nodes: Iterable[object]) -> None:
    """Raise PromptError if a retriever returned a value that is not a node."""
    for rank, one in enumerate(nodes):
        if not isinstance(one, NodeWithScore):
            raise PromptError(
                f"the retriever gave a {type(one).__name__} in place of a node, as number {rank}; have it return "
                "NodeWithScore(node=TextNode(text=...))"
            )


def _with_system(text: str | None, messages: list[ChatMessage]) -> list[ChatMessage]:
    """Return the messages after the model's own system prompt, which LlamaIndex puts before any prompt."""
    return [ChatMessage(role=MessageRole.SYSTEM, content=text), *messages] if text else messages


def _behind_system(messages: list[ChatMessage], history: list[ChatMessage]) -> list[ChatMessage]:
    """Return the messages with earlier turns inserted after the template's system message."""
    start = 1 if messages and messages[0].role == MessageRole.SYSTEM else 0
    return [*messages[:start], *history, *messages[start:]]


def _pieces(responses: Iterable[ChatResponse | CompletionResponse]) -> Generator[str, None, None]:
    for response in responses:
        if response.delta:
            yield response.delta


async def _apieces(responses: AsyncIterable[ChatResponse | CompletionResponse]) -> AsyncGenerator[str, None]:
    async for response in responses:
        if response.delta:
            yield response.delta
