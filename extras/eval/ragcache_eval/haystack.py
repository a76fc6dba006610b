"""Contexts of a wanted length, cut into passages, with sentences put in at wanted depths."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from pathlib import Path

from ragcache.errors import ConfigError
from ragcache.ingest.sentences import split_sentences
from ragcache_eval.case import CasePassage
from ragcache_eval.registry import DataSplit, draw_world, write_document

CountTokens = Callable[[str], int]
WORLD_SIZE = 60


def filler(seed: int) -> Iterator[str]:
    """Yield endless sentences of generated prose about people, towns, rivers and clubs; all drawn worlds differ."""
    rng = random.Random(f"filler/{seed}")
    while True:
        world = draw_world(rng, DataSplit.TRAIN, WORLD_SIZE)
        for entity in world.entities.values():
            yield from (one.strip() for one in split_sentences(write_document(rng, entity).text))


def text_sentences(path: Path) -> list[str]:
    """Return the sentences of a user's own haystack. Raises ConfigError for a file that is unreadable or empty."""
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
    """Yield endless sentences of a text file, or generated sentences; the same seed and file give the same.

    Raises ConfigError as `text_sentences` does.
    """
    return cycle(text_sentences(Path(path))) if path else filler(seed)


class Haystack:
    """Sentences with their lengths."""

    def __init__(self, count_tokens: CountTokens, endless: Iterator[str]) -> None:
        """Take sentences from `endless`, such as `prose` yields."""
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
        """Return passages of about `passage_tokens` that hold `num_tokens` in all, needles among them.

        needles: (sentence, depth); depth is the share of the hay before the needle, in 0..1. A needle goes to the end
        of the sentence nearest to its depth.
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
    """Join rows (sentence, tokens, is needle) until a passage is full; a passage that holds a needle is gold."""
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
