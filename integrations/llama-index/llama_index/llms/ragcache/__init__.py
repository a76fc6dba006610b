"""A language model for LlamaIndex that answers by fused prefill over KV blocks."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

from llama_index.core.base.llms import types
from llama_index.core.bridge.pydantic import Field, PrivateAttr
from llama_index.core.constants import DEFAULT_NUM_OUTPUTS
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.llms.llm import ToolSelection

import ragcache as rc
from llama_index.llms.ragcache.messages import to_messages
from llama_index.llms.ragcache.segments import FusedPrompt, PassageBlock, as_passages
from ragcache.errors import ConfigError

__all__ = ["FusedPrompt", "PassageBlock", "RagCacheLLM"]

if TYPE_CHECKING:
    from llama_index.core.tools.types import BaseTool

# The engine's options. The sampling is given by its fields, and cancelling is up to LlamaIndex.
_READING = tuple(name for name in rc.GenerationOptions.__annotations__ if name not in ("sampling", "cancelled"))
_FORMS = ("json_schema", "regex", "choices")  # of the sampling, given with a call only
_SAMPLING = tuple(field.name for field in fields(rc.Sampling) if field.name not in _FORMS)
_TOOLS = ("tools", "tool_choice", "parallel_tool_calls", "tool_format")
_CHAT = ("context", "drop_turns")
_OPTIONS = (*_SAMPLING, *_FORMS, *_READING, "segments")
Event = rc.Sources | rc.Reasoning | rc.Token | rc.ToolCall | rc.Done
T = TypeVar("T")


class _Step(NamedTuple):
    """A step of an answer: text, calls and reasoning so far, new text, and at the end the engine's answer."""

    text: str
    delta: str
    calls: tuple[rc.ToolCall, ...]
    thoughts: str = ""
    answer: rc.Answer | None = None


_AsyncSteps = AsyncGenerator[_Step, None]


class RagCacheLLM(FunctionCallingLLM):
    """The language model of a store. A store that is passed in open is closed by its opener.

    Apart from plain prompts it reads passages by fused prefill: only the rest of the prompt runs through the model. See
    `llama_index.llms.ragcache.segments` for the three ways to pass them. Every field may also be given with a call, as
    a keyword. The last response of a call holds the engine's answer as JSON in `raw`: sources, timings, usage.
    """

    max_tokens: int | None = Field(default=None, description="Most tokens of an answer; None: until its end.")
    temperature: float = Field(default=0.0, description="0 always takes the likeliest token.")
    top_p: float | None = Field(default=None, description="Share of probability that tokens are drawn from.")
    top_k: int | None = Field(default=None, description="Number of likeliest tokens that are drawn from.")
    seed: int | None = Field(default=None, description="Makes drawing repeatable.")
    stop: list[str] = Field(default_factory=list, description="Texts that end an answer.")
    min_p: float | None = Field(default=None, description="Least share of the likeliest token's probability.")
    presence_penalty: float | None = Field(default=None, description="Off a token's logit once it was used.")
    frequency_penalty: float | None = Field(default=None, description="Off a token's logit for each use.")
    repetition_penalty: float | None = Field(default=None, description="Divides logits of tokens seen before.")
    logit_bias: dict[int, float] | None = Field(default=None, description="Added to the logits of these ids.")
    stop_token_ids: list[int] | None = Field(default=None, description="Ids that end an answer.")
    logprobs: int | None = Field(default=None, description="Likeliest tokens to report beside each one, in raw.")
    method: str | None = Field(default=None, description="Fusion method; the store's own when absent.")
    method_options: dict[str, Any] = Field(default_factory=dict, description="Options of the method.")
    on_overflow: str = Field(default="error", description='Passages that do not fit: "error" or "trim".')
    timeout_s: float | None = Field(default=None, description="Seconds that an answer may take, waiting included.")
    order: str = Field(default="relevance", description='Of passages: "relevance", or "shared" for method full.')
    hint: bool = Field(default=True, description="With order shared: say which passages rank first.")
    reasoning_effort: str | None = Field(default=None, description="How much the model thinks: none to xhigh.")
    enable_thinking: bool | None = Field(default=None, description="False: it answers at once.")
    thinking_budget: int | None = Field(default=None, description="Tokens after which its thoughts are ended.")
    chat_template_kwargs: dict[str, Any] | None = Field(default=None, description="Variables of the chat template.")
    context: str = Field(default="last", description='"keep": each turn of a chat keeps the passages of its message.')
    drop_turns: bool = Field(default=True, description="Leave out a chat's oldest messages that do not fit the model.")
    _kb: rc.RagCache = PrivateAttr()

    def __init__(
        self, kb: rc.RagCache | str | Path, *, model: str | None = None, collection: str | None = None, **options: Any
    ) -> None:
        """Open the model.

        kb: an open store, or the path of a store, which is opened once for all components that name it, and closed with
            the last of these
        model: to open a path with; None: the store's own
        collection: passages named by id or handle come from this collection alone; None: from all that kb shows
        Raises ConfigError for a field that is out of range or unknown, and the errors of `rc.open_shared`.
        """
        _refuse_unknown(set(options) - set(type(self).model_fields), (*_OPTIONS, *_CHAT))
        super().__init__(**options)
        self._kb = rc.open_shared(kb, model=model, collection=collection)
        self._options({})

    @classmethod
    def class_name(cls) -> str:
        return "RagCacheLLM"

    @property
    def kb(self) -> rc.RagCache:
        """Return the open store."""
        return self._kb

    @property
    def metadata(self) -> types.LLMMetadata:
        lm = self._kb.lm
        return types.LLMMetadata(
            context_window=lm.max_positions,
            num_output=self.max_tokens or DEFAULT_NUM_OUTPUTS,
            is_chat_model=lm.tokenizer.chat_template is not None,
            is_function_calling_model="tools" in str(lm.tokenizer.chat_template),
            model_name=lm.name,
        )

    def __getstate__(self) -> dict[str, Any]:
        raise ConfigError("a model with an open store cannot be pickled; open the store where it is used")

    # Chat

    @llm_chat_callback()
    def chat(self, messages: Sequence[types.ChatMessage], **kwargs: Any) -> types.ChatResponse:
        """Answer the last user message.

        segments: passages put before the last user message; or PassageBlocks inside messages, read at their place
        tools:    functions that the model may call, with tool_choice, parallel_tool_calls and tool_format, as in
                  `rc.RagCache.chat`. `chat_with_tools` takes LlamaIndex's own tools

        json_schema, regex, choices: constraint on decoding, as in `rc.Sampling`

        Raises PromptError, ContextTooLongError, UnknownHandleError, ConfigError.
        """
        return _chat_response(_last(self._chat_steps(messages, kwargs)))

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[types.ChatMessage], **kwargs: Any) -> types.ChatResponseGen:
        return (_chat_response(step) for step in self._chat_steps(messages, kwargs))

    @llm_chat_callback()
    async def achat(self, messages: Sequence[types.ChatMessage], **kwargs: Any) -> types.ChatResponse:
        return _chat_response(await _alast(self._chat_asteps(messages, kwargs)))

    @llm_chat_callback()
    async def astream_chat(self, messages: Sequence[types.ChatMessage], **kwargs: Any) -> types.ChatResponseAsyncGen:
        return _aeach(_chat_response, self._chat_asteps(messages, kwargs))

    # Completion

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> types.CompletionResponse:
        """Continue a raw prompt, without the chat template.

        segments: passages put before the prompt; or a FusedPrompt, whose passages are read at their place
        """
        return _completion_response(_last(self._completion_steps(prompt, formatted, kwargs)))

    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> types.CompletionResponseGen:
        return (_completion_response(step) for step in self._completion_steps(prompt, formatted, kwargs))

    @llm_completion_callback()
    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> types.CompletionResponse:
        return _completion_response(await _alast(self._completion_asteps(prompt, formatted, kwargs)))

    @llm_completion_callback()
    async def astream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> types.CompletionResponseAsyncGen:
        return _aeach(_completion_response, self._completion_asteps(prompt, formatted, kwargs))

    # Tools

    def _prepare_chat_with_tools(
        self,
        tools: Sequence[BaseTool],
        user_msg: str | types.ChatMessage | None = None,
        chat_history: list[types.ChatMessage] | None = None,
        verbose: bool = False,
        allow_parallel_tool_calls: bool = False,
        tool_required: bool = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        asked = [types.ChatMessage(user_msg) if isinstance(user_msg, str) else user_msg] if user_msg is not None else []
        shown = [tool.metadata.to_openai_tool(skip_length_check=True) for tool in tools]
        choice = kwargs.pop("tool_choice", None) or ("required" if tool_required and shown else "auto")
        chosen = {"tools": shown, "tool_choice": choice, "parallel_tool_calls": allow_parallel_tool_calls}
        return {"messages": [*(chat_history or ()), *asked], **chosen, **kwargs}

    def get_tool_calls_from_response(
        self, response: types.ChatResponse, error_on_no_tool_call: bool = True, **kwargs: Any
    ) -> list[ToolSelection]:
        """Return the calls of a response, without unreadable calls, whose blocks hold the text that the model wrote.

        Raises ConfigError (a ValueError) if there is no call.
        """
        blocks = [block for block in response.message.blocks if isinstance(block, types.ToolCallBlock)]
        found = [
            ToolSelection(tool_id=block.tool_call_id or "", tool_name=block.tool_name, tool_kwargs=block.tool_kwargs)
            for block in blocks
            if isinstance(block.tool_kwargs, dict)
        ]
        if not found and error_on_no_tool_call:
            raise ConfigError("the model called no tool, or wrote no JSON; pass tool_required=True to have it call one")
        return found

    # Calls of the engine

    def _chat_steps(self, messages: Sequence[types.ChatMessage], kwargs: Mapping[str, Any]) -> Iterator[_Step]:
        return _steps(self._kb.stream_chat(to_messages(messages), **self._chat_options(kwargs)))

    def _chat_asteps(self, messages: Sequence[types.ChatMessage], kwargs: Mapping[str, Any]) -> _AsyncSteps:
        return _asteps(self._kb.astream_chat(to_messages(messages), **self._chat_options(kwargs)))

    def _completion_steps(self, prompt: str, formatted: bool, kwargs: Mapping[str, Any]) -> Iterator[_Step]:
        return _steps(self._kb.stream_completion(self._parts(prompt, formatted, kwargs), **self._options(kwargs)))

    def _completion_asteps(self, prompt: str, formatted: bool, kwargs: Mapping[str, Any]) -> _AsyncSteps:
        return _asteps(self._kb.astream_completion(self._parts(prompt, formatted, kwargs), **self._options(kwargs)))

    def _chat_options(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        options = {**self._options(kwargs, *_CHAT, *_TOOLS), **{n: kwargs.get(n, getattr(self, n)) for n in _CHAT}}
        options |= {name: kwargs[name] for name in _TOOLS if name in kwargs}
        if kwargs.get("segments"):
            options["passages"] = as_passages(kwargs["segments"])
        return options

    def _parts(self, prompt: str, formatted: bool, kwargs: Mapping[str, Any]) -> list[Any]:
        parts: Sequence[Any] = prompt.parts if isinstance(prompt, FusedPrompt) else [self._whole(prompt, formatted)]
        return [*as_passages(kwargs.get("segments") or ()), *parts]

    def _whole(self, prompt: str, formatted: bool) -> str:
        return prompt if formatted or self.completion_to_prompt is None else self.completion_to_prompt(prompt)

    def _options(self, kwargs: Mapping[str, Any], *more: str) -> dict[str, Any]:
        """Return the options of the engine: the fields, overridden by the call's options. Raises ConfigError.

        more: further names that the call may have
        """
        known = (*_OPTIONS, *more)
        _refuse_unknown(set(kwargs) - set(known), known)
        chosen = {name: kwargs.get(name, getattr(self, name)) for name in (*_SAMPLING, *_READING)}
        chosen["stop"] = chosen["stop"] or ()
        if chosen["max_tokens"] is None:
            chosen["max_tokens"] = self.max_tokens
        forms = {name: kwargs[name] for name in _FORMS if name in kwargs}
        given = {name: chosen[name] for name in _SAMPLING if chosen[name] is not None}
        sampling = rc.Sampling(**given, **forms)
        return {"sampling": sampling, **{name: chosen[name] for name in _READING}}


def _refuse_unknown(names: set[str], known: Sequence[str]) -> None:
    if names:
        raise ConfigError(f"RagCacheLLM knows no option {sorted(names)[0]!r}; options are {', '.join(known)}")


class _Stepper:
    """Turns the engine's events into steps."""

    def __init__(self) -> None:
        self._text = self._thoughts = ""
        self._calls: tuple[rc.ToolCall, ...] = ()

    def see(self, event: Event) -> _Step | None:
        if isinstance(event, rc.Done):
            return _Step(event.answer.text, "", self._calls, self._thoughts, event.answer)
        delta = event.text if isinstance(event, rc.Token) else ""
        if isinstance(event, rc.Reasoning):
            self._thoughts += event.text
        elif isinstance(event, rc.ToolCall):
            self._calls += (event,)
        self._text += delta
        return None if isinstance(event, rc.Sources) else _Step(self._text, delta, self._calls, self._thoughts)


def _steps(events: Iterator[Event]) -> Iterator[_Step]:
    stepper = _Stepper()
    return (step for event in events if (step := stepper.see(event)))


def _asteps(events: AsyncIterator[Event]) -> _AsyncSteps:
    stepper = _Stepper()
    closable = cast("AsyncGenerator[Event, None]", events)  # closing it stops the work

    async def steps() -> _AsyncSteps:
        async with aclosing(closable):
            async for event in closable:
                if step := stepper.see(event):
                    yield step

    return steps()


async def _aeach(response: Callable[[_Step], T], steps: _AsyncSteps) -> AsyncGenerator[T, None]:
    """Yield the response of each step. A stream that is closed early ends the steps."""
    async with aclosing(steps):
        async for step in steps:
            yield response(step)


def _last(steps: Iterator[T]) -> T:
    for step in steps:
        last = step
    return last


async def _alast(steps: AsyncIterator[T]) -> T:
    async for step in steps:
        last = step
    return last


def _chat_response(step: _Step) -> types.ChatResponse:
    text = [types.TextBlock(text=step.text)] if step.text or not step.calls else []
    thoughts = [types.ThinkingBlock(content=step.thoughts)] if step.thoughts else []
    message = types.ChatMessage(role=types.MessageRole.ASSISTANT, blocks=[*thoughts, *text, *map(_block, step.calls)])
    return types.ChatResponse(message=message, delta=step.delta, **_account(step.answer))


def _block(call: rc.ToolCall) -> types.ToolCallBlock:
    """Return a call as a block; an unreadable call keeps the model's text as a string."""
    arguments = json.loads(call.arguments) if call.error is None else call.arguments
    return types.ToolCallBlock(tool_call_id=call.id, tool_name=call.name, tool_kwargs=arguments)


def _completion_response(step: _Step) -> types.CompletionResponse:
    return types.CompletionResponse(text=step.text, delta=step.delta, **_account(step.answer))


def _account(answer: rc.Answer | None) -> dict[str, Any]:
    """Return the answer and the token counts of the last response, under the names that LlamaIndex looks for."""
    if answer is None:
        return {}
    usage = answer.usage
    counts = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
    return {"raw": answer.to_json(), "additional_kwargs": counts}
