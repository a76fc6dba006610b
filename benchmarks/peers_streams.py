"""The questions for all peers: streams of prompts of token ids, the same for each peer.

new, again       passages that no peer has read, then another question over the same passages in the same order
random           passages drawn evenly from a pool

The pool's passages are known beforehand, as those of a RAG application are: a peer that can read passages ahead of the
questions does so.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Question:
    """A question. passages: numbers of its passages, in order; suffix: token ids of everything after them"""

    passages: tuple[int, ...]
    suffix: tuple[int, ...]


@dataclass(frozen=True)
class Sizes:
    """Sizes of prompts: passages x tokens, then a question of `suffix` tokens. pool: passages known beforehand"""

    passages: int
    tokens: int
    suffix: int
    pool: int
    vocab_size: int
    seed: int


class Streams:
    """Streams of questions. Every draw depends on the seed and its own name, never on earlier draws."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes

    def passage(self, number: int) -> list[int]:
        return self._ids("passage", number, self.sizes.tokens)

    def prompt(self, question: Question) -> dict[str, list[int] | list[list[int]]]:
        """Return the prompt in a worker's form."""
        return {"passages": [self.passage(number) for number in question.passages], "suffix": list(question.suffix)}

    def new(self, number: int) -> Question:
        """Return a question over its own passages, outside the pool."""
        first = self.sizes.pool + number * self.sizes.passages
        return Question(tuple(range(first, first + self.sizes.passages)), self._suffix("new", number))

    def again(self, number: int, asker: int = 0) -> Question:
        """Return another question over the passages of `new`."""
        return Question(self.new(number).passages, self._suffix(f"again {asker}", number))

    def random(self, count: int, label: str = "random") -> list[Question]:
        return [self._drawn(label, number) for number in range(count)]

    def _drawn(self, label: str, number: int) -> Question:
        chosen = self._generator(label, number).choice(self.sizes.pool, self.sizes.passages, replace=False)
        return Question(tuple(int(one) for one in chosen), self._suffix(label, number))

    def _suffix(self, label: str, number: int) -> tuple[int, ...]:
        return tuple(self._ids(f"question, {label}", number, self.sizes.suffix))

    def _ids(self, label: str, number: int, count: int) -> list[int]:
        drawn: list[int] = self._generator(label, number).integers(self.sizes.vocab_size, size=count).tolist()
        return drawn

    def _generator(self, label: str, number: int) -> np.random.Generator:
        return np.random.default_rng([self.sizes.seed, number, *label.encode()])
