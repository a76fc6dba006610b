"""Needle in a Haystack: a sentence at a known depth of a long text (Kamradt 2023), over lengths and depths."""

from __future__ import annotations

import random
from dataclasses import dataclass

from ragcache.errors import ConfigError
from ragcache_eval.case import Case
from ragcache_eval.haystack import CountTokens, Haystack, prose

CITIES = ("San Francisco", "Lisbon", "Kyoto", "Nairobi", "Quito", "Tallinn", "Perth", "Bergen", "Oaxaca", "Izmir")
FOODS = ("a sandwich", "a bowl of noodles", "a cheese pie", "grilled fish", "a plate of dumplings", "an orange")
SPOTS = ("in the old park", "on the harbour wall", "at the clock tower", "by the botanical garden", "on the long pier")
DAYS = ("on a sunny day", "on a rainy morning", "at sunset", "in the first snow", "on a quiet Sunday")


@dataclass(frozen=True)
class NeedleSettings:
    """lengths:  tokens of the whole context; depths: per cent of it that stands before the needle
    passage:  tokens of a passage; questions: needles a cell; haystack: a text file, generated prose if not given
    """

    lengths: tuple[int, ...] = (512, 1024, 2048)
    depths: tuple[int, ...] = (0, 25, 50, 75, 100)
    passage: int = 128
    questions: int = 5
    haystack: str = ""
    seed: int = 0

    def __post_init__(self) -> None:
        if not all(0 <= depth <= 100 for depth in self.depths):
            raise ConfigError(f"depths={'/'.join(map(str, self.depths))}: a depth is a percentage, 0 to 100")
        check_lengths(self.lengths, self.passage, self.questions)


def check_lengths(lengths: tuple[int, ...], passage: int, questions: int) -> None:
    """Raise ConfigError for sizes that leave nothing to read."""
    if min(lengths) < 64 or passage < 16 or questions < 1:
        raise ConfigError("lengths must be at least 64 tokens, a passage 16, and there must be a question")


def needle_cases(settings: NeedleSettings, count_tokens: CountTokens, limit: int | None = None) -> list[Case]:
    """Return the cases. `limit` overrides `settings.questions`. The same settings and tokenizer give the same cases."""
    cases = []
    for number in range(limit or settings.questions):
        rng = random.Random(f"needle/{settings.seed}/{number}")
        city = rng.choice(CITIES)
        answer = f"eat {rng.choice(FOODS)} {rng.choice(SPOTS)} {rng.choice(DAYS)}"
        needle, question = f"The best thing to do in {city} is to {answer}.", f"What is the best thing to do in {city}?"
        hay = Haystack(count_tokens, prose(settings.seed + 1000 * number, settings.haystack))
        for length in settings.lengths:
            for depth in settings.depths:
                passages = hay.with_needles(length, [(needle, depth / 100)], settings.passage)
                id = f"needle-{length}-{depth}-{number}"
                cases.append(Case(id, question, passages, (answer,), cell={"length": length, "depth": depth}))
    return cases
