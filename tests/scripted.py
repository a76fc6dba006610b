"""A model that says what a test wrote: the words of a script are the likeliest, and all else is the real thing."""

import pytest

from ragcache.models.card import ModelCard, eos_token_ids
from ragcache.models.sampler import Sampler


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
