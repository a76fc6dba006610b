"""Choice of the next token: greedy or sampled, with penalties, biases, and log-probabilities of the chosen tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation import logits_process

from ragcache.errors import Config, ConfigError, check_type
from ragcache.models.structured import as_json, choice_grammar, json_grammar, regex_grammar
from ragcache.models.thoughts import Form

COLD = 1e-5
MAX_LOGPROBS = 20
"""OpenAI's and vLLM's own bound."""
NUMBERS: dict[str, tuple[Callable[[float], bool], str]] = {
    "max_tokens": (lambda n: n >= 1, "at least 1"),
    "temperature": (lambda n: 0 <= n < math.inf, "0 (greedy) or more"),
    "top_p": (lambda n: 0 < n <= 1, "in (0, 1]"),
    "top_k": (lambda n: n >= 1, "at least 1"),
    "seed": (math.isfinite, "a number"),
    "min_p": (lambda n: 0 <= n <= 1, "in [0, 1]"),
    "presence_penalty": (math.isfinite, "a number, 0 for none"),
    "frequency_penalty": (math.isfinite, "a number, 0 for none"),
    "repetition_penalty": (lambda n: 0 < n < math.inf, "above 0, and 1 for none"),
    "logprobs": (lambda n: 0 <= n <= MAX_LOGPROBS, f"in 0 to {MAX_LOGPROBS}, or None for none"),
}


@dataclass(frozen=True)
class Sampling(Config, max_tokens="max_new_tokens max_completion_tokens n_predict num_predict", temperature="temp"):
    """How tokens are chosen.

    max_tokens:  longest answer, in tokens; None: until the end of text, or the context is full
    temperature: 0 is greedy
    top_p, top_k: nucleus and top-k cuts; None for none
    seed:        makes sampling repeatable
    stop:        strings at which the answer ends; they are not part of it
    json_schema: the answer is JSON that this schema (an object, or JSON) accepts; {"type": "object"}: any JSON object
    regex:       the answer matches this regular expression, in Rust's syntax
    choices:     the answer is one of these texts
    min_p:       leave out tokens with less than this share of the likeliest token's probability
    presence_penalty, frequency_penalty: subtracted from the logit of each token in the answer, once per token and once
                 per occurrence (OpenAI)
    repetition_penalty: divides the positive and multiplies the negative logits of tokens of prompt and answer (CTRL)
    logit_bias:  added to the logits of these token ids
    stop_token_ids: ids at which the answer ends; they are not part of it
    logprobs:    how many of the likeliest tokens to report with each chosen token (`Answer.logprobs`). Their
                 log-probabilities are the model's own, before all of the above; None: no report

    At most one of json_schema, regex and choices may be given; they need the extra "structured". An answer that reaches
    max_tokens is cut in mid-form. Raises ConfigError naming the field that is out of range or cannot be compiled.
    """

    max_tokens: int | None = None
    temperature: float = 0.0
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    json_schema: Mapping[str, Any] | str | None = None
    regex: str | None = None
    choices: Sequence[str] | None = None
    min_p: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None

    def __post_init__(self) -> None:
        for name, (fits, meant) in NUMBERS.items():
            if (value := getattr(self, name)) != self.__dataclass_fields__[name].default:
                check_type(name, value, Real, "give a number")
                if not fits(value):
                    raise ConfigError(f"{name} is {value}; it must be {meant}", name)
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        if any(not s for s in self.stop):
            raise ConfigError("a stop string is empty")
        for id, bias in self.logit_bias.items():
            if not math.isfinite(bias):
                raise ConfigError(f"logit_bias of token {id} is {bias}; it must be a number, -100 for never")
        if self.json_schema is not None:
            object.__setattr__(self, "json_schema", as_json(self.json_schema))
        if self.choices is not None:
            object.__setattr__(self, "choices", (self.choices,) if isinstance(self.choices, str) else (*self.choices,))
        if sum(form is not None for form in (self.json_schema, self.regex, self.choices)) > 1:
            raise ConfigError("json_schema, regex and choices exclude each other; choose one")
        self.grammar()  # a form that cannot be compiled is reported before anything runs

    def check_ids(self, vocab_size: int, name: str) -> None:
        """Raise ConfigError for token ids that the model called `name` does not have."""
        for option, ids in (("logit_bias", self.logit_bias), ("stop_token_ids", self.stop_token_ids)):
            if bad := [id for id in ids if not 0 <= id < vocab_size]:
                raise ConfigError(f"{option} names token id {bad[0]}; {name} has ids 0 to {vocab_size - 1}", option)

    def grammar(self) -> str | None:
        """Return the grammar of the answer's form, for llguidance; None: any form."""
        if isinstance(self.json_schema, str):
            return json_grammar(self.json_schema)
        if self.regex is not None:
            return regex_grammar(self.regex)
        return None if self.choices is None else choice_grammar(tuple(self.choices))


class TokenScores(NamedTuple):
    """Log-probabilities of a chosen token and of the likeliest tokens at its place, with their ids."""

    logprob: float
    top: tuple[tuple[int, float], ...]


class Penalties:
    """Penalties on the logits of tokens said before, in vLLM's order: biases, repetition, frequency, presence."""

    def __init__(self, sampling: Sampling, device: torch.device, prompt_ids: Sequence[int]) -> None:
        self._sampling = sampling
        self._biased = torch.tensor(list(sampling.logit_bias), dtype=torch.int64, device=device)
        self._biases = torch.tensor(list(sampling.logit_bias.values()), dtype=torch.float32, device=device)
        self._prompt = torch.tensor(prompt_ids, dtype=torch.int64, device=device)
        self._counts: Tensor | None = None

    @staticmethod
    def wanted(sampling: Sampling) -> bool:
        penalises = sampling.presence_penalty or sampling.frequency_penalty or sampling.repetition_penalty != 1
        return bool(penalises or sampling.logit_bias)

    def apply(self, logits: Tensor) -> Tensor:
        """Return the logits with biases and penalties applied. logits: float32 [vocab_size]"""
        if self._counts is None:
            self._counts = torch.zeros_like(logits)
        counts, by = self._counts, self._sampling
        logits = logits.index_add(0, self._biased, self._biases)
        if by.repetition_penalty != 1:
            has_occurred = (counts > 0).index_fill(0, self._prompt, True)
            lowered = torch.where(logits > 0, logits / by.repetition_penalty, logits * by.repetition_penalty)
            logits = torch.where(has_occurred, lowered, logits)
        return logits - by.frequency_penalty * counts - by.presence_penalty * (counts > 0)

    def accept(self, token: int) -> None:
        """Count this token as said."""
        if self._counts is not None:
            self._counts[token] += 1


class Sampler:
    """A function from logits to the next token. Sampling follows transformers' order: temperature, top-k, top-p, min-p.

    never: ids that are not chosen, whatever their logits
    constraint: the form that restricts the next token
    prompt_ids: ids that a repetition penalty counts as said, besides the answer
    scores: gets each token's log-probabilities, if the sampling requests them
    """

    def __init__(
        self,
        sampling: Sampling,
        device: torch.device,
        never: Collection[int] = (),
        constraint: Form | None = None,
        prompt_ids: Sequence[int] = (),
        scores: list[TokenScores] | None = None,
    ) -> None:
        self._constraint = constraint
        self._penalties = Penalties(sampling, device, prompt_ids) if Penalties.wanted(sampling) else None
        self._scores = scores
        self._logprobs = sampling.logprobs
        self._never = torch.tensor(sorted(never), dtype=torch.int64, device=device)
        # Logits divided by less than COLD overflow float32; by then the likeliest token has all of the probability.
        self._greedy = sampling.temperature < COLD
        self._warpers = LogitsProcessorList()
        if self._greedy:
            return
        self._warpers.append(logits_process.TemperatureLogitsWarper(float(sampling.temperature)))
        if sampling.top_k is not None:
            self._warpers.append(logits_process.TopKLogitsWarper(sampling.top_k))
        if sampling.top_p is not None:
            self._warpers.append(logits_process.TopPLogitsWarper(sampling.top_p))
        if sampling.min_p is not None:
            self._warpers.append(logits_process.MinPLogitsWarper(sampling.min_p))
        self._generator = torch.Generator(device)
        if sampling.seed is not None:
            self._generator.manual_seed(sampling.seed)
        else:
            self._generator.seed()

    def __call__(self, logits: Tensor) -> int:
        allowed = logits if self._penalties is None else self._penalties.apply(logits)
        if self._never.numel():
            allowed = allowed.index_fill(0, self._never, float("-inf"))
        token = self._choose(allowed if self._constraint is None else self._constraint.allow(allowed))
        if self._constraint is not None:
            self._constraint.accept(token)
        if self._penalties is not None:
            self._penalties.accept(token)
        if self._scores is not None and self._logprobs is not None:
            self._scores.append(token_scores(logits, token, self._logprobs))
        return token

    def _choose(self, logits: Tensor) -> int:
        if self._greedy:
            return int(logits.argmax())
        scores = self._warpers(torch.empty(1, 0, dtype=torch.long, device=logits.device), logits[None])
        return int(torch.multinomial(scores.softmax(-1)[0], 1, generator=self._generator))


def token_scores(logits: Tensor, token: int, count: int) -> TokenScores:
    """Return the log-probabilities of a chosen token and of the likeliest tokens.

    logits: float32 [vocab_size], that the token was chosen from. count: how many of the likeliest tokens to include
    """
    logprobs = logits.log_softmax(-1)
    best = logprobs.topk(min(count, len(logprobs)))
    return TokenScores(float(logprobs[token]), tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True)))
