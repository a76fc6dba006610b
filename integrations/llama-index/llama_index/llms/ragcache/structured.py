"""Answers that are pydantic objects: decoding is held to the class's JSON schema, by every fusion method."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Mapping
from typing import Any, TypeAlias, cast

from llama_index.core.base.llms.types import ChatMessage, ChatResponse
from llama_index.core.bridge.pydantic import ValidationError
from llama_index.core.instrumentation.events.llm import LLMStructuredPredictEndEvent, LLMStructuredPredictStartEvent
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.program.utils import FlexibleModel, process_streaming_objects
from llama_index.core.prompts import PromptTemplate
from llama_index.core.types import Model, PydanticProgramMode
from llama_index_instrumentation import get_dispatcher

from ragcache.errors import ConfigError

_dispatcher = get_dispatcher(__name__)
_Partial: TypeAlias = Model | list[Model] | FlexibleModel | list[FlexibleModel]  # as the base class has it


class HeldToSchema(FunctionCallingLLM):
    """`structured_predict` and its twins, and so `as_structured_llm`, by constrained decoding.

    Another `pydantic_program_mode` than the default one chooses LlamaIndex's own way.
    """

    @_dispatcher.span
    def structured_predict(
        self,
        output_cls: type[Model],
        prompt: PromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Model:
        """An object of the class. llm_kwargs: options of the call, such as segments

        Raises ConfigError for an answer that was cut at `max_tokens`, or without the extra `structured`.
        """
        if not self._holds:
            return cast("Model", super().structured_predict(output_cls, prompt, llm_kwargs, **prompt_args))
        _dispatcher.event(
            LLMStructuredPredictStartEvent(output_cls=output_cls, template=prompt, template_args=prompt_args)
        )
        messages, options = self._asked(output_cls, prompt, llm_kwargs, prompt_args)
        return _end(_made(output_cls, self.chat(messages, **options)))

    @_dispatcher.span
    async def astructured_predict(
        self,
        output_cls: type[Model],
        prompt: PromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Model:
        if not self._holds:
            return cast("Model", await super().astructured_predict(output_cls, prompt, llm_kwargs, **prompt_args))
        _dispatcher.event(
            LLMStructuredPredictStartEvent(output_cls=output_cls, template=prompt, template_args=prompt_args)
        )
        messages, options = self._asked(output_cls, prompt, llm_kwargs, prompt_args)
        return _end(_made(output_cls, await self.achat(messages, **options)))

    def _structured_stream_call(
        self,
        output_cls: type[Model],
        prompt: PromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Generator[_Partial[Model], None, None]:
        if not self._holds:
            yield from super()._structured_stream_call(output_cls, prompt, llm_kwargs, **prompt_args)
            return
        messages, options = self._asked(output_cls, prompt, llm_kwargs, prompt_args)
        for response in self.stream_chat(messages, **options):
            yield _partly_made(output_cls, response)
        yield _made(output_cls, response)

    async def _structured_astream_call(
        self,
        output_cls: type[Model],
        prompt: PromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> AsyncGenerator[_Partial[Model], None]:
        if not self._holds:
            return await super()._structured_astream_call(output_cls, prompt, llm_kwargs, **prompt_args)
        messages, options = self._asked(output_cls, prompt, llm_kwargs, prompt_args)
        responses = await self.astream_chat(messages, **options)

        async def objects() -> AsyncGenerator[_Partial[Model], None]:
            async for response in responses:
                yield _partly_made(output_cls, response)
            yield _made(output_cls, response)

        return objects()

    @property
    def _holds(self) -> bool:
        return self.pydantic_program_mode == PydanticProgramMode.DEFAULT

    def _asked(
        self,
        output_cls: type[Model],
        prompt: PromptTemplate,
        llm_kwargs: Mapping[str, Any] | None,
        prompt_args: Mapping[str, Any],
    ) -> tuple[list[ChatMessage], dict[str, Any]]:
        messages = self._extend_messages(prompt.format_messages(llm=self, **prompt_args))
        return messages, {**(llm_kwargs or {}), "json_schema": output_cls.model_json_schema()}


def _made(output_cls: type[Model], response: ChatResponse) -> Model:
    text = response.message.content or ""
    try:
        return output_cls.model_validate_json(text)
    except ValidationError as error:
        cut = isinstance(response.raw, dict) and response.raw.get("finish_reason") == "length"
        why = (
            "it was cut: raise max_tokens" if cut else f"it breaks a rule that its JSON schema does not state: {error}"
        )
        raise ConfigError(f"the answer is no {output_cls.__name__} ({why}); it was {text!r}") from error


def _partly_made(output_cls: type[Model], response: ChatResponse) -> Model | FlexibleModel:
    return cast("Model | FlexibleModel", process_streaming_objects(response, output_cls, flexible_mode=True))


def _end(made: Model) -> Model:
    _dispatcher.event(LLMStructuredPredictEndEvent(output=made))
    return made
