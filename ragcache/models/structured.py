"""Answers of a given form: after every token, a grammar states which tokens may follow (llguidance)."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ragcache.errors import ConfigError

EXAMPLE = '{"type": "object"}'
MAX_GRAMMAR = 1 << 18
"""Most characters of a schema, an expression or choices, so that no grammar takes unbounded time."""
KEPT = 32
"""Number of compiled grammars of each kind to keep."""


@lru_cache(maxsize=KEPT)
def json_grammar(schema: str) -> str:
    """Return the grammar of a JSON schema, given as JSON text. Raises ConfigError if it cannot be compiled.

    The grammar allows no flexible white space, which an answer could continue for ever.
    """
    _check_size("json_schema has", len(schema))
    return _checked(
        _library().LLMatcher.grammar_from_json_schema(schema, defaults={"whitespace_flexible": False}), "json_schema"
    )


@lru_cache(maxsize=KEPT)
def regex_grammar(expression: str) -> str:
    """Return the grammar of a regular expression. Raises ConfigError if it cannot be compiled."""
    _check_size("regex has", len(expression))
    return _checked(_library().LLMatcher.grammar_from_regex(expression), "regex")


@lru_cache(maxsize=KEPT)
def choice_grammar(choices: tuple[str, ...]) -> str:
    """Return the grammar of a choice between these texts. Raises ConfigError for an empty text, or without any text."""
    if not choices or not all(isinstance(choice, str) and choice for choice in choices):
        raise ConfigError("choices must be texts with something in them, at least one")
    _check_size("choices have", sum(map(len, choices)))
    return _checked(_library().LLMatcher.grammar_from_lark(f"start: {' | '.join(map(json.dumps, choices))}"), "choices")


def as_json(schema: Mapping[str, Any] | str) -> str:
    """Convert a schema to JSON text. Raises ConfigError if it is not a JSON object."""
    try:
        text = schema if isinstance(schema, str) else json.dumps(schema)
        found = json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"json_schema is no JSON ({error}); give a schema such as {EXAMPLE}", "json_schema"
        ) from error
    if not isinstance(found, dict):
        raise ConfigError(f"json_schema is no JSON object; give a schema such as {EXAMPLE}", "json_schema")
    return text


def _check_size(subject: str, size: int) -> None:
    if size > MAX_GRAMMAR:
        raise ConfigError(f"{subject} {size} characters; {MAX_GRAMMAR} are the most", subject.split()[0])


def _checked(grammar: str, name: str) -> str:
    is_error, messages = _library().LLMatcher.validate_grammar_with_warnings(grammar)
    if is_error:
        raise ConfigError(f"{name} cannot be compiled: {' '.join(messages).strip()}", name)
    return grammar


def _library() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise ConfigError("answers of a given form need llguidance; pip install 'ragcache-kv[structured]'") from error
    return llguidance


class Constraint:
    """The state of an answer in its grammar. Raises ConfigError for a model that cannot be constrained."""

    def __init__(
        self, grammar: str, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int, eos_ids: Collection[int]
    ) -> None:
        if not eos_ids:
            raise ConfigError("the model has no token that ends a text, so an answer of a given form could not end")
        self._vocabulary = _vocabulary(tokenizer, vocab_size, tuple(sorted(eos_ids)))
        self._matcher = _library().LLMatcher(self._vocabulary, grammar, log_level=0)

    def allow(self, logits: Tensor) -> Tensor:
        """Return the logits, float32 [vocab_size], with -inf for every token that may not come next."""
        allowed = torch.frombuffer(bytearray(self._matcher.compute_logit_bias()), dtype=torch.uint8)
        if self._matcher.is_error():
            raise ConfigError(f"the answer's form is too complex: {self._matcher.get_error()}")
        forbidden = torch.ones(logits.shape[0], dtype=torch.bool)
        forbidden[: allowed.shape[0]] = allowed[: logits.shape[0]] == 0
        return logits.masked_fill(forbidden.to(logits.device), float("-inf"))

    def accept(self, token: int) -> None:
        """Advance past this token."""
        self._matcher.consume_token(token)


@lru_cache(maxsize=8)
def _vocabulary(tokenizer: PreTrainedTokenizerBase | None, vocab_size: int, eos_ids: tuple[int, ...]) -> Any:
    """Convert the tokenizer to llguidance's form, which takes a second for a large tokenizer."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ConfigError("answers of a given form need the model's fast tokenizer (tokenizer.json), and it has none")
    from llguidance.hf import from_tokenizer

    return from_tokenizer(tokenizer, n_vocab=vocab_size, eos_token=list(eos_ids))
