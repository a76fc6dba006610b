"""A chat model that answers by fused prefill."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, closing, contextmanager
from dataclasses import fields
from importlib.util import find_spec
from operator import itemgetter
from typing import Any, Literal, Self, cast

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel, ModelProfile
from langchain_core.language_models.base import LangSmithParams, LanguageModelInput
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.output_parsers import JsonOutputParser, PydanticOutputParser
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool
from langchain_core.utils.pydantic import is_basemodel_subclass
from pydantic import ConfigDict, Field, model_validator

import ragcache as rc
from langchain_ragcache.answers import PROVIDER, ChunkWriter, to_result
from langchain_ragcache.messages import to_engine
from langchain_ragcache.opening import open_kb
from langchain_ragcache.options import refuse_unknown
from ragcache.errors import CancelledError, ConfigError, ModelMismatchError, TimedOutError

# OpenAI's newer names of fields.
ALSO = {"max_completion_tokens": "max_tokens"}
# Constraints on an answer's form, given with a call only.
FORMS = ("json_schema", "regex", "choices")
SAMPLING = tuple(field.name for field in fields(rc.Sampling) if field.name not in (*FORMS, "stop"))
TOOLS = ("tools", "tool_choice", "parallel_tool_calls", "tool_format")
# The engine's options that are not among RENAMED keep their names. LangChain has its own ways to state the others: the
# fields of the sampling, cancelling the task or closing the stream, and `timeout`.
RENAMED = ("sampling", "cancelled", "timeout_s")
READING = (*(name for name in rc.GenerationOptions.__annotations__ if name not in RENAMED), "context", "drop_turns")
# `stream` is LangChain's own switch, and `model` is only checked.
CALL_OPTIONS = (*SAMPLING, *ALSO, *FORMS, *TOOLS, *READING, "timeout", "model", "stream")
# Standard parameters of chat models for reaching a service, which have no effect here.
OF_SERVICES = ("api_key", "base_url", "max_retries")


class ChatRagCache(BaseChatModel):
    """A chat model over the language model of a store. Passages in the messages are read by fused prefill.

    A passage is a text block that is marked in its extras (`document_block(document)`, or `create_text_block(text,
    id=..., ragcache={"handle": ...})`); other text is prompt. `create_fused_documents_chain` makes such messages from
    documents. A conversation without passages is read as it is.

    kb:          an open `rc.RagCache`, or the path of a store, which is opened once for all components that name it,
                 and closed with the last of these; if left out, the store named by RAGCACHE_STORE
    model:       the model to open a path with; by default the store's own. For an open store another model is refused
    max_tokens (also max_completion_tokens), temperature, top_p, top_k, seed, stop, min_p, presence_penalty,
    frequency_penalty, repetition_penalty, logit_bias, stop_token_ids, logprobs: see `rc.Sampling`; log-probabilities
                 are in the response metadata, in the form of OpenAI's chat model
    method, method_options, on_overflow, order, hint, reasoning_effort, enable_thinking, thinking_budget,
    chat_template_kwargs: see `rc.GenerationOptions`
    collection:  answer from this collection of the store alone; None: from all that kb shows
    context:     "last", or "keep": every turn keeps the passages of its message
    drop_turns:  leave out the oldest messages if they do not fit the model; False: raise ContextTooLongError
    timeout:     seconds that an answer may take, waiting included: `timeout_s` of `rc.GenerationOptions`

    `invoke`, `bind` and similar methods take the same options except kb, as well as json_schema, regex and choices of
    `rc.Sampling` and the options that `bind_tools` binds. Unknown options are refused. api_key, base_url and
    max_retries are accepted at construction, as by every chat model, and have no effect.
    Raises PromptError, ContextTooLongError, UnknownHandleError, ConfigError, CancelledError.
    """

    kb: rc.RagCache = Field(exclude=True, repr=False)
    model: str = ""
    collection: str | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float = Field(default=0.0, ge=0)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=1)
    seed: int | None = None
    min_p: float | None = Field(default=None, ge=0, le=1)
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = Field(default=None, gt=0)
    logit_bias: Mapping[int, float] | None = None
    stop_token_ids: Sequence[int] | None = None
    logprobs: int | None = Field(default=None, ge=0)
    stop: list[str] | str | None = None
    method: str | None = None
    method_options: Mapping[str, Any] | None = None
    on_overflow: str = "error"
    order: str = "relevance"
    hint: bool = True
    reasoning_effort: str | None = None
    enable_thinking: bool | None = None
    thinking_budget: int | None = Field(default=None, ge=0)
    chat_template_kwargs: Mapping[str, Any] | None = None
    context: str = "last"
    drop_turns: bool = True
    timeout: float | None = Field(default=None, gt=0)
    streaming: bool = False

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _open(cls, values: Any) -> Any:
        """Open a path with the named model, and drop the parameters for a service."""
        given = {ALSO.get(name, name): value for name, value in values.items() if name not in OF_SERVICES}
        if isinstance(given.get("kb"), rc.RagCache):
            return {**given, "kb": open_kb(given["kb"], collection=given.get("collection"))}
        kb = open_kb(given.get("kb"), model=given.get("model") or None, collection=given.get("collection"))
        return {**given, "kb": kb, "model": kb.lm.name}

    @model_validator(mode="after")
    def _take_model(self) -> Self:
        self._check_model(self.model or self.kb.lm.name)
        self.model = self.kb.lm.name
        return self

    @model_validator(mode="after")
    def _set_ragcache_version(self) -> Self:
        """Add the version for traces, next to those that LangChain adds itself."""
        known = (self.metadata or {}).get("lc_versions")
        versions = dict(known) if isinstance(known, Mapping) else {}
        self.metadata = {**(self.metadata or {}), "lc_versions": {**versions, "ragcache": rc.__version__}}
        return self

    def _check_model(self, name: str) -> None:
        if name != self.kb.lm.name:
            raise ModelMismatchError(
                f"model {name!r} was asked for, and this store's KV belongs to {self.kb.lm.name!r}; leave the model "
                "out, or open a store of that model"
            )

    # Answering

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        with naming_timeout(self._option(kwargs, "timeout")):
            answer = self.kb.chat(to_engine(messages), **self._reading(stop, kwargs))
        return to_result(answer, self.model)

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        with naming_timeout(self._option(kwargs, "timeout")):
            answer = await self.kb.achat(to_engine(messages), **self._reading(stop, kwargs))
        return to_result(answer, self.model)

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        with naming_timeout(self._option(kwargs, "timeout")):
            writer = ChunkWriter(self.model)
            events = self.kb.stream_chat(to_engine(messages), **self._reading(stop, kwargs))
            with closing(cast("Any", events)):
                for event in events:
                    if (chunk := writer.chunk(event)) is None:
                        continue
                    if run_manager:
                        run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                    yield chunk

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        with naming_timeout(self._option(kwargs, "timeout")):
            writer = ChunkWriter(self.model)
            events = self.kb.astream_chat(to_engine(messages), **self._reading(stop, kwargs))
            async with aclosing(cast("Any", events)):
                async for event in events:
                    if (chunk := writer.chunk(event)) is None:
                        continue
                    if run_manager:
                        await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                    yield chunk

    def _option(self, given: Mapping[str, Any], name: str) -> Any:
        return given.get(name, getattr(self, name))

    def _reading(self, stop: list[str] | str | None, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the engine's options for a call. Raises ConfigError, ModelMismatchError."""
        refuse_unknown(type(self).__name__, given, CALL_OPTIONS)
        given = {ALSO.get(name, name): value for name, value in given.items()}
        self._check_model(given.get("model") or self.model)
        chosen = {name: self._option(given, name) for name in SAMPLING} | {name: given.get(name) for name in FORMS}
        sampling = {name: value for name, value in chosen.items() if value is not None}
        ends = _stops(self.stop if stop is None else stop)
        reading = {name: self._option(given, name) for name in READING}
        limit = self._option(given, "timeout")
        options = {**reading, "timeout_s": limit, "sampling": rc.Sampling(**sampling, stop=tuple(ends))}
        return {**options, **_tools(given)}

    def bind_tools(
        self,
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool],
        *,
        tool_choice: str | bool | dict[str, Any] | None = None,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """Return a model that may call tools, which its own chat template shows to it.

        tools:       functions, tools, Pydantic classes or OpenAI schemas
        tool_choice: "auto"; "any", "required" or True: at least one call; the name of a tool; "none". All but the first
                     and the last constrain the answer to the tools' schemas and need the extra "structured"
        strict:      forbids, in the schema, arguments that the schema does not name
        kwargs:      options of every call, such as parallel_tool_calls=False (at most one call) and tool_format

        A call raises ConfigError for a model whose template shows no tools.
        """
        shown = [convert_to_openai_tool(tool, strict=strict) for tool in tools]
        chosen = {"tool_choice": tool_choice} if tool_choice else {}
        return self.bind(tools=shown, **chosen, **kwargs)

    def with_structured_output(
        self,
        schema: dict[str, Any] | type | None = None,
        *,
        method: Literal["json_schema", "function_calling", "json_mode"] = "json_schema",
        include_raw: bool = False,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, Any]:
        """Return a model whose answers are objects of a schema. Decoding is constrained to it, so the prompt need not
        explain it.

        schema: a Pydantic class (answers are its instances), a TypedDict class, or a JSON or OpenAI schema (dicts)
        method: "json_schema", or "function_calling" with the same effect; "json_mode" constrains answers to JSON only
        strict: False lets objects have properties that the schema does not name and does not forbid
        include_raw: answer {"raw": message, "parsed": object or None, "parsing_error": error or None}

        An answer that reaches max_tokens is cut and gives no object. Raises ConfigError.
        """
        refuse_unknown("with_structured_output", kwargs, ())
        if schema is None and method != "json_mode":
            raise ConfigError("with_structured_output needs a schema; without one use method='json_mode'")
        wanted: Any = {"type": "object"}
        if schema is not None and method != "json_mode":
            wanted = convert_to_json_schema(schema)
        parser: Runnable[Any, Any] = JsonOutputParser()
        if isinstance(schema, type) and is_basemodel_subclass(schema):
            parser = PydanticOutputParser(pydantic_object=schema)
        told = {"kwargs": {"method": method, "strict": strict}, "schema": wanted}
        held_to = wanted if strict is False else _closed(wanted)
        llm = self.bind(json_schema=held_to, ls_structured_output_format=told)
        if not include_raw:
            return llm | parser
        parsed = RunnablePassthrough.assign(parsed=itemgetter("raw") | parser, parsing_error=lambda _: None)
        failed = RunnablePassthrough.assign(parsed=lambda _: None)
        raw: Runnable[LanguageModelInput, Any] = RunnableMap(raw=llm)
        return raw | parsed.with_fallbacks([failed], exception_key="parsing_error")

    # About the model

    @property
    def _llm_type(self) -> str:
        return "ragcache"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        """Return the parameters that answers depend on: for the key of LangChain's answer cache, and traces."""
        own = {name: getattr(self, name) for name in (*SAMPLING, *READING, "stop")}
        method = self.method or self.kb.method
        return {"model": self.model, "fingerprint": self.kb.lm.fingerprint, **own, "method": method}

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = super()._get_ls_params(stop=_stops(self.stop if stop is None else stop) or None, **kwargs)
        params["ls_provider"] = PROVIDER
        return params

    def _resolve_model_profile(self) -> ModelProfile:
        calls_tools = "tools" in str(self.kb.lm.tokenizer.chat_template)
        return ModelProfile(
            max_input_tokens=self.kb.lm.max_positions,
            text_inputs=True,
            text_outputs=True,
            tool_calling=calls_tools,
            # An agent that calls tools gets its schema as a tool, because an answer constrained to JSON could call
            # none.
            structured_output=find_spec("llguidance") is not None and not calls_tools,
        )

    def get_token_ids(self, text: str) -> list[int]:
        """Return the token ids of the store's own tokenizer, without special tokens."""
        if self.custom_get_token_ids is not None:
            return self.custom_get_token_ids(text)
        ids: list[int] = self.kb.lm.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids


def _tools(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the engine's tool options, translated from LangChain's names."""
    options = {name: given[name] for name in TOOLS if name in given}
    if options.get("tool_choice") in ("any", True):
        options["tool_choice"] = "required"
    return options


def _closed(schema: Any) -> Any:
    """Return the schema with additional properties forbidden in every object that does not allow them."""
    if isinstance(schema, list):
        return [_closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {name: _closed(part) for name, part in schema.items()}
    return (
        {"additionalProperties": False, **closed}
        if closed.get("type") == "object" and "properties" in closed
        else closed
    )


@contextmanager
def naming_timeout(limit: float | None) -> Iterator[None]:
    """Raise CancelledError instead of the engine's TimedOutError, naming the limit as LangChain does."""
    try:
        yield
    except TimedOutError as error:
        raise CancelledError(f"the answer took longer than timeout={limit} s; allow more time") from error


def _stops(given: list[str] | str | None) -> list[str]:
    """Return the stop strings as a list, also for a single text."""
    return [given] if isinstance(given, str) else list(given or ())
