"""Decoding over a filled cache: greedy and sampled, stop strings, streaming, cancellation."""

from __future__ import annotations

import threading
from collections.abc import Collection, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedTokenizerBase
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from ragcache.errors import ConfigError
from ragcache.kv.cache import FusedCache
from ragcache.models.limits import Limit
from ragcache.models.lm import LanguageModel
from ragcache.models.structured import Constraint, as_json, choice_grammar, json_grammar, regex_grammar


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen.

    max_tokens:  longest answer, in tokens
    temperature: 0 is greedy
    top_p, top_k: nucleus and top-k cuts; None for none
    seed:        makes sampling repeatable
    stop:        strings at which the answer ends; they are not part of it
    json_schema: the answer is JSON that this schema (an object, or JSON) accepts; {"type": "object"}: any JSON object
    regex:       the answer matches this regular expression, of Rust's syntax
    choices:     the answer is one of these texts

    Of the last three there may be one; they need the extra "structured". An answer that reaches max_tokens is cut in
    mid-form. Raises ConfigError naming the field that is out of range, or what cannot be compiled.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    json_schema: Mapping[str, Any] | str | None = None
    regex: str | None = None
    choices: Sequence[str] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        if self.max_tokens < 1:
            raise ConfigError(f"max_tokens is {self.max_tokens}; it must be at least 1")
        if not 0 <= self.temperature < float("inf"):
            raise ConfigError(f"temperature is {self.temperature}; it must be 0 (greedy) or more")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p is {self.top_p}; it must be in (0, 1]")
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(f"top_k is {self.top_k}; it must be at least 1")
        if any(not s for s in self.stop):
            raise ConfigError("a stop string is empty")
        if self.json_schema is not None:
            object.__setattr__(self, "json_schema", as_json(self.json_schema))
        if self.choices is not None:
            object.__setattr__(self, "choices", (self.choices,) if isinstance(self.choices, str) else (*self.choices,))
        if sum(form is not None for form in (self.json_schema, self.regex, self.choices)) > 1:
            raise ConfigError("json_schema, regex and choices exclude each other; choose one")
        self.grammar()  # whatever cannot be compiled is said before anything runs

    def grammar(self) -> str | None:
        """The answer's form as llguidance reads it; None: any."""
        if isinstance(self.json_schema, str):
            return json_grammar(self.json_schema)
        if self.regex is not None:
            return regex_grammar(self.regex)
        return None if self.choices is None else choice_grammar(tuple(self.choices))


class Chooser:
    """Picks the next token from logits. Sampling follows transformers' own order: temperature, top-k, top-p.

    never: ids that are not chosen, whatever their logits
    constraint: says what may come next
    """

    def __init__(
        self,
        sampling: Sampling,
        device: torch.device,
        never: Collection[int] = (),
        constraint: Constraint | None = None,
    ) -> None:
        self._constraint = constraint
        self._never = torch.tensor(sorted(never), dtype=torch.int64, device=device)
        self._greedy = sampling.temperature == 0
        self._warpers = LogitsProcessorList()
        if self._greedy:
            return
        self._warpers.append(TemperatureLogitsWarper(float(sampling.temperature)))
        if sampling.top_k is not None:
            self._warpers.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p is not None:
            self._warpers.append(TopPLogitsWarper(sampling.top_p))
        self._generator = torch.Generator(device)
        if sampling.seed is not None:
            self._generator.manual_seed(sampling.seed)
        else:
            self._generator.seed()

    def __call__(self, logits: Tensor) -> int:
        if self._never.numel():
            logits = logits.index_fill(0, self._never, float("-inf"))
        if self._constraint is None:
            return self._choose(logits)
        token = self._choose(self._constraint.allow(logits))
        self._constraint.accept(token)
        return token

    def _choose(self, logits: Tensor) -> int:
        if self._greedy:
            return int(logits.argmax())
        scores = self._warpers(torch.empty(1, 0, dtype=torch.long, device=logits.device), logits[None])
        return int(torch.multinomial(scores.softmax(-1)[0], 1, generator=self._generator))


def decode(
    lm: LanguageModel,
    cache: FusedCache,
    logits: Tensor,
    position: int,
    sampling: Sampling,
    *,
    eos_ids: Sequence[int] = (),
    never: Collection[int] = (),
    cancelled: threading.Event | None = None,
    limit: Limit | None = None,
) -> Generator[int, None, None]:
    """Yield token ids until an EOS (not yielded), `max_tokens`, or the model's last position.

    logits:   float32 [vocab_size] of the prompt's last token
    position: of the first answer token
    never:    ids that are not chosen, beside those that the checkpoint's training for reuse added
    limit:    when to give up, in place of `cancelled` alone

    Steps of sequences that are decoded at the same time share forward passes, and go on while the caller is busy with
    what it got. Raises CancelledError once `cancelled` is set, what `limit` raises, and ConfigError for a form that the
    model cannot be held to.
    """
    grammar = sampling.grammar()
    form = None if grammar is None else Constraint(grammar, lm.tokenizer, lm.vocab_size, eos_ids)
    choose = Chooser(sampling, logits.device, {*never, *lm.unsaid_ids}, form)
    last = min(position + sampling.max_tokens, lm.max_positions)
    yield from lm.scheduler.decode(cache, logits, choose, position, last, eos_ids, limit or Limit(cancelled))


class TextStream:
    """Turns ids into text pieces as they arrive.

    A piece is held back while it may still change (an unfinished UTF-8 sequence) or may be the start of a stop
    string. Joined, the pieces equal the decoded ids, cut before the first stop string (law 7).
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._ids: list[int] = []
        self._sent = 0
        self.stopped = False

    def push(self, token: int) -> str:
        """The text that this token completes; may be empty. Sets `stopped` when a stop string was met."""
        self._ids.append(token)
        return self._emit(self._text(), final=False)

    def finish(self) -> str:
        """The text that is still held back."""
        return "" if self.stopped else self._emit(self._text(), final=True)

    def _text(self) -> str:
        return str(self._tokenizer.decode(self._ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def _emit(self, text: str, *, final: bool) -> str:
        cut = min((at for s in self._stop if (at := text.find(s)) >= 0), default=-1)
        if cut >= 0:
            self.stopped = True
            text = text[:cut]
        elif not final:
            text = text[: len(text) - self._held_back(text)]
        piece = text[self._sent :]
        self._sent = max(self._sent, len(text))
        return piece

    def _held_back(self, text: str) -> int:
        """Characters at the end that may still change, and before them those that may begin a stop string."""
        sure = text.rstrip("\ufffd")
        begun = (n for s in self._stop for n in range(min(len(s) - 1, len(sure)), 0, -1) if sure.endswith(s[:n]))
        return len(text) - len(sure) + max(begun, default=0)
