"""A model's reasoning before its answer: its place in the output, and the ways to end it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any, Literal, Protocol, get_args

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ragcache.errors import ConfigError, check_choice, check_type
from ragcache.prompt import control_tokens, template_text

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
"""OpenAI's levels of `reasoning_effort`."""
EFFORTS = get_args(Effort)
TEMPLATE_OPTIONS = ("reasoning_effort", "enable_thinking", "chat_template_kwargs")
"""Options that are passed to a chat template."""


@dataclass(frozen=True)
class Thinking:
    """How a chat template makes its model think.

    open, close: texts around the thoughts
    answer:      text between `close` and the answer, if the model writes any
    """

    open: str
    close: str
    answer: str = ""

    @property
    def signs(self) -> tuple[str, ...]:
        """Return the texts that show that a chat template makes its model think.

        Some templates contain only the end, to drop earlier thoughts.
        """
        return (self.open, self.close) if "/" in self.close else (self.open,)

    def markers(self, tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
        """Return the special tokens in `open`, `close` and `answer`, which are part of no other text."""
        written = self.open + self.close + self.answer
        special = control_tokens(tokenizer, special_only=True)
        return tuple(spelling for spelling in special.values() if spelling and spelling in written)

    def is_open(self, tokenizer: PreTrainedTokenizerBase, prompt_ids: Sequence[int], *, inside: bool = False) -> bool:
        """Return whether the template has begun the thoughts, so that the prompt ends with their opening.

        inside: also accept any text after the opening that does not contain their end
        """
        last = list(prompt_ids if inside else prompt_ids[-16:])
        _, opened, behind = str(tokenizer.decode(last, clean_up_tokenization_spaces=False)).rpartition(
            self.open.rstrip()
        )
        return bool(opened) and (self.close.strip() not in behind if inside else not behind.strip())


FORMS = (
    Thinking("<|channel|>analysis<|message|>", "<|end|>", "<|start|>assistant<|channel|>final<|message|>"),
    Thinking("<|channel>thought\n", "<channel|>"),
    Thinking("[THINK]", "[/THINK]"),
    Thinking("<think>", "</think>"),
)


def thinking_of(tokenizer: PreTrainedTokenizerBase) -> Thinking | None:
    """Return how the tokenizer's chat template makes the model think; None: it does not."""
    written = template_text(tokenizer)
    return next((form for form in FORMS if any(sign in written for sign in form.signs)), None)


def template_variables(tokenizer: PreTrainedTokenizerBase, effort: Any, enable: Any, given: Any) -> dict[str, Any]:
    """Return the variables to pass to the chat template: those about thinking, and those that the caller gives.

    effort, enable, given: values of TEMPLATE_OPTIONS, unchecked; None: not given

    Raises ConfigError for an unknown effort, for values that contradict each other, for names reserved for a template's
    own input, and for a model that is to think although its template has no thinking.
    """
    check_type("enable_thinking", enable, (bool, NoneType), "give True, False or None")
    check_type("chat_template_kwargs", given, (Mapping, NoneType), "give a mapping of names")
    if effort is not None:
        check_choice("reasoning_effort", effort, EFFORTS)
    if effort is not None and enable is not None and enable == (effort == "none"):
        raise ConfigError(
            f"reasoning_effort {effort!r} and enable_thinking={enable} contradict each other", "reasoning_effort"
        )
    variables = {str(name): value for name, value in (given or {}).items()}
    if taken := sorted(RESERVED & variables.keys()):
        raise ConfigError(
            f"chat_template_kwargs has {', '.join(taken)}, which ragcache gives the template itself; leave it out",
            "chat_template_kwargs",
        )
    thinks = enable if effort is None else effort != "none"
    if thinks and thinking_of(tokenizer) is None:
        name = "enable_thinking" if effort is None else "reasoning_effort"
        raise ConfigError(
            f"{name}: the model's chat template does not have it think; leave it out, or take a model that does "
            "(Qwen3, GPT-OSS, Magistral)",
            name,
        )
    if thinks is not None:
        variables.setdefault("enable_thinking", thinks)
    if effort is not None and effort != "none":
        variables.setdefault("reasoning_effort", effort)
    return variables


RESERVED = {
    "conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt", "tokenize",
    "continue_final_message", "return_tensors", "return_dict", "padding", "truncation", "max_length",
    "tokenizer_kwargs", "return_assistant_tokens_mask",
}  # fmt: skip


class Form(Protocol):
    """The form of an answer, which restricts its next token."""

    def allow(self, logits: Tensor) -> Tensor: ...

    def accept(self, token: int) -> None: ...


class ThoughtLimit:
    """A form that ends thoughts at a budget, and applies the answer's own form after them.

    form:    of the answer; it does not apply inside the thoughts
    budget:  number of thought tokens after which their end is written; None: no limit
    is_open: whether the prompt has begun them
    """

    def __init__(
        self,
        thinking: Thinking,
        tokenizer: PreTrainedTokenizerBase,
        budget: int | None,
        is_open: bool,
        form: Form | None,
    ) -> None:
        texts = (thinking.open, thinking.close, thinking.close + thinking.answer)  # as the model writes them
        self._open, self._close, self._end = (
            list(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts
        )
        self._form = form
        self._budget = budget
        self._is_open = is_open
        self._spent = 0
        self._due: list[int] = []
        self._ids: list[int] = []

    def allow(self, logits: Tensor) -> Tensor:
        """Return the logits, float32 [vocab_size], with -inf for every token that may not come next."""
        if self._due:
            only = torch.full_like(logits, float("-inf"))
            only[self._due[0]] = 0.0
            return only
        return logits if self._is_open or self._form is None else self._form.allow(logits)

    def accept(self, token: int) -> None:
        """Advance past this token."""
        self._ids.append(token)
        if self._due:
            self._due.pop(0)
            self._is_open = bool(self._due)
        elif self._is_open:
            self._spent += 1
            if self._ends_with(self._close):
                self._is_open = False
            elif self._budget is not None and self._spent >= self._budget:
                self._due = list(self._end)
        elif self._form is not None:
            self._form.accept(token)
        elif self._ends_with(self._open):
            self._is_open = True
            if self._budget == 0:
                self._due = list(self._end)

    def _ends_with(self, ids: Sequence[int]) -> bool:
        return self._ids[-len(ids) :] == list(ids)
