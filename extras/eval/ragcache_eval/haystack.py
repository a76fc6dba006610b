"""Contexts of a wanted length, cut into passages, with sentences put in at wanted depths."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

from ragcache.errors import ConfigError
from ragcache.ingest.text_blocks import split_sentences
from ragcache_eval.case import Case, CasePassage
from ragcache_eval.registry import DataSplit, draw_world, write_document

CountTokens = Callable[[str], int]
WORLD_SIZE = 60


def filler(seed: int) -> Iterator[str]:
    """Endless sentences of generated prose about people, towns, rivers and clubs; no two drawn worlds are alike."""
    rng = random.Random(f"filler/{seed}")
    while True:
        world = draw_world(rng, DataSplit.TRAIN, WORLD_SIZE)
        for entity in world.entities.values():
            yield from (one.strip() for one in split_sentences(write_document(rng, entity).text))


def text_sentences(path: Path) -> list[str]:
    """Sentences of a user's own haystack. Raises ConfigError for a file that cannot be read or has no text."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"haystack={path} cannot be read ({error}); name a text file in UTF-8") from error
    sentences = [" ".join(one.split()) for one in split_sentences(text)]
    found = [one for one in sentences if one]
    if not found:
        raise ConfigError(f"haystack={path} holds no text")
    return found


def prose(seed: int, path: str = "") -> Iterator[str]:
    """Endless sentences of a text file, or generated ones; the same seed and file give the same.

    Raises ConfigError as `text_sentences` does.
    """
    return cycle(text_sentences(Path(path))) if path else filler(seed)


class Haystack:
    """Sentences with their lengths."""

    def __init__(self, count_tokens: CountTokens, endless: Iterator[str]) -> None:
        """endless: sentences to take from; `prose` has some."""
        self._count = count_tokens
        self._endless = endless
        self._taken: list[tuple[str, int]] = []

    def sentences(self, num_tokens: int) -> list[tuple[str, int]]:
        """Whole sentences with their token counts, as many as fit into `num_tokens`."""
        total, found = 0, []
        for place in range(len(self._taken) + num_tokens + 1):
            if place == len(self._taken):
                sentence = next(self._endless)
                self._taken.append((sentence, self._count(f"{sentence} ")))
            total += self._taken[place][1]
            if total > num_tokens:
                break
            found.append(self._taken[place])
        return found

    def with_needles(
        self, num_tokens: int, needles: Sequence[tuple[str, float]], passage_tokens: int
    ) -> tuple[CasePassage, ...]:
        """Passages of about `passage_tokens` that hold `num_tokens` in all, needles among them.

        needles: (sentence, depth); depth is the share of the hay that stands before it, in 0..1. A needle goes to the
        end of the sentence nearest to its depth.
        """
        room = num_tokens - sum(self._count(f"{needle} ") for needle, _ in needles)
        hay = self.sentences(max(room, 0))
        ends = [0]
        for _, tokens in hay:
            ends.append(ends[-1] + tokens)
        rows = [(sentence, tokens, False) for sentence, tokens in hay]
        for needle, depth in sorted(needles, key=lambda pair: -pair[1]):
            place = min(range(len(ends)), key=lambda index: abs(ends[index] - depth * ends[-1]))
            rows.insert(place, (needle, self._count(f"{needle} "), True))
        return tuple(_passages(rows, passage_tokens))


def _passages(rows: Sequence[tuple[str, int, bool]], passage_tokens: int) -> Iterator[CasePassage]:
    """Rows (sentence, tokens, is needle) joined until a passage is full; one that holds a needle is gold."""
    current: list[tuple[str, int, bool]] = []
    for row in rows:
        if current and sum(tokens for _, tokens, _ in current) + row[1] > passage_tokens:
            yield _joined(current)
            current = []
        current.append(row)
    if current:
        yield _joined(current)


def _joined(rows: Sequence[tuple[str, int, bool]]) -> CasePassage:
    return CasePassage(
        " ".join(sentence for sentence, _, _ in rows), is_gold=any(is_needle for _, _, is_needle in rows)
    )


# Needle in a Haystack: one sentence at a known depth of a long text (Kamradt 2023), over lengths and depths.


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
    """Raises ConfigError for sizes that leave nothing to read."""
    if min(lengths) < 64 or passage < 16 or questions < 1:
        raise ConfigError("lengths must be at least 64 tokens, a passage 16, and there must be a question")


def needle_cases(settings: NeedleSettings, count_tokens: CountTokens, limit: int | None = None) -> list[Case]:
    """`limit` takes the place of `settings.questions`. Same settings and tokenizer, same cases."""
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
