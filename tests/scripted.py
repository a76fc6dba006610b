"""A model that says what a test wrote: the words of a script are the likeliest, and all else is the real thing."""

import pytest

from ragcache.models.card import ModelCard, eos_token_ids
from ragcache.models.sampler import Sampler

PLACE = {"type": "object", "properties": {"name": {"enum": ["Kelbrook", "Arno"]}}, "required": ["name"]}
SEARCH = {"type": "function", "function": {"name": "search", "description": "Finds texts.", "parameters": PLACE}}
CALL = '<tool_call>\n{"name": "search", "arguments": {"name": "Arno"}}\n</tool_call>'
CLOCK_CALL = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
BROKEN = '<tool_call>\n{"name": "search", "arguments": {"name": }}\n</tool_call>'
THINKS = "{# <think> #}{{ '(quiet)' if enable_thinking == false }}{{ reasoning_effort }}{{ messages[-1].content }}"
"""A template whose model thinks: what it is told of that, and the last message."""
THOUGHT = "<think>\nWho is it?\n</think>\n\nJonas."


def script(monkeypatch: pytest.MonkeyPatch, card: ModelCard, *answers: str) -> None:
    """The model's next answers, one after another, each with its end. A form that forbids a word still does."""
    said = iter(answers)
    born, choose = Sampler.__init__, Sampler.__call__
    end = min(eos_token_ids(card))

    def begin(self: Sampler, *args: object, **more: object) -> None:
        born(self, *args, **more)
        self.words = iter(_ids(card, next(said, "")))

    def bias(self: Sampler, logits: object) -> int:
        likelier = logits.clone()
        likelier[next(self.words, end)] += 1e6
        return choose(self, likelier)

    monkeypatch.setattr(Sampler, "__init__", begin)
    monkeypatch.setattr(Sampler, "__call__", bias)


def _ids(card: ModelCard, text: str) -> list[int]:
    """Without the space that some tokenizers put before a text, which no form allows."""
    ids = card.tokenizer(text, add_special_tokens=False)["input_ids"]
    spaced = ids and text[:1] != " " and card.tokenizer.convert_ids_to_tokens(ids[0]) == "\u0120"
    return list(ids[1:] if spaced else ids)
