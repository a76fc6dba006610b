"""A chat engine that answers over nodes by fused prefill."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.callbacks import CallbackManager
from llama_index.core.chat_engine import ContextChatEngine
from llama_index.core.llms import LLM
from llama_index.core.memory import BaseMemory, Memory
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.prompts import BasePromptTemplate, ChatPromptTemplate, PromptTemplate
from llama_index.core.settings import Settings

from llama_index.llms.ragcache import RagCacheLLM
from llama_index.response_synthesizers.ragcache import FusedSynthesizer
from ragcache.errors import ConfigError

__all__ = ["RagCacheChatEngine"]


class RagCacheChatEngine(ContextChatEngine):
    """LlamaIndex's context chat engine with the KV of passages reused.

    Every turn retrieves passages for the message and answers over them, with earlier turns from the memory. Without a
    context template the passages are put before the last user message, as in the store's own prompt; with a template
    they are in the system message, at its place for them.
    """

    def __init__(
        self,
        retriever: BaseRetriever,
        llm: LLM,
        memory: BaseMemory,
        prefix_messages: list[ChatMessage],
        node_postprocessors: list[BaseNodePostprocessor] | None = None,
        context_template: str | PromptTemplate | None = None,
        context_refine_template: str | PromptTemplate | None = None,
        callback_manager: CallbackManager | None = None,
    ) -> None:
        """Make a chat engine.

        Raises ConfigError if the model is not a RagCacheLLM, if the context template lacks {context_str}, or if there
        is a refine template: passages are read together, and no answer is refined.
        """
        if not isinstance(llm, RagCacheLLM):
            raise ConfigError(f"RagCacheChatEngine needs a RagCacheLLM, not {type(llm).__name__}")
        if context_refine_template is not None:
            raise ConfigError("context_refine_template has no use here: all passages are read together; leave it out")
        super().__init__(
            retriever, llm, memory, prefix_messages, node_postprocessors, context_template, None, callback_manager
        )
        self._fused_llm = llm
        self._written = context_template is not None
        self._get_response_synthesizer([])  # refuses a bad template here, not at the first message

    @classmethod
    def from_defaults(
        cls,
        retriever: BaseRetriever,
        chat_history: list[ChatMessage] | None = None,
        memory: BaseMemory | None = None,
        system_prompt: str | None = None,
        prefix_messages: list[ChatMessage] | None = None,
        node_postprocessors: list[BaseNodePostprocessor] | None = None,
        context_template: str | PromptTemplate | None = None,
        context_refine_template: str | PromptTemplate | None = None,
        llm: LLM | None = None,
        **kwargs: Any,
    ) -> Self:
        """Make a chat engine with the defaults of ContextChatEngine. The default memory counts the model's own
        tokens and keeps as many as fit half its context, so that passages have room.
        """
        chosen = llm or Settings.llm
        if system_prompt is not None and prefix_messages is not None:
            raise ConfigError("give system_prompt or prefix_messages, not both")
        if system_prompt is not None:
            prefix_messages = [ChatMessage(role=MessageRole.SYSTEM, content=system_prompt)]
        return cls(
            retriever,
            chosen,
            memory or _memory(chosen, chat_history or []),
            prefix_messages or [],
            node_postprocessors,
            context_template,
            context_refine_template,
            Settings.callback_manager,
        )

    def _get_response_synthesizer(  # type: ignore[override]  # callers use names only; both synthesize alike
        self, chat_history: list[ChatMessage], streaming: bool = False
    ) -> FusedSynthesizer:
        prefix = self._prefix_messages
        template: BasePromptTemplate | None = None
        if self._written:
            system = next((str(one.content) for one in prefix[:1] if one.role == MessageRole.SYSTEM), "")
            prefix = prefix[1:] if system else prefix
            template = _template(self._context_template, system)
        return FusedSynthesizer(
            self._fused_llm,
            text_qa_template=template,
            history=[*prefix, *chat_history],
            streaming=streaming,
            callback_manager=self.callback_manager,
        )


def _template(context: PromptTemplate, system: str) -> ChatPromptTemplate:
    """Return a template of the context and the system prompt as a system message, then the question."""
    return ChatPromptTemplate(
        [
            ChatMessage(role=MessageRole.SYSTEM, content=context.template + system.strip()),
            ChatMessage(role=MessageRole.USER, content="{query_str}"),
        ],
        function_mappings=context.function_mappings,
    )


def _memory(llm: LLM, history: Sequence[ChatMessage]) -> Memory:
    if not isinstance(llm, RagCacheLLM):
        raise ConfigError(f"RagCacheChatEngine needs a RagCacheLLM, not {type(llm).__name__}")
    tokenizer = llm.kb.lm.tokenizer
    return Memory.from_defaults(
        chat_history=list(history),
        token_limit=llm.metadata.context_window // 2,
        tokenizer_fn=lambda text: list(tokenizer(text, add_special_tokens=False)["input_ids"]),
    )
