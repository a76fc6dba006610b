"""RULER's synthetic tasks (Hsieh et al. 2024, arXiv 2404.06654), written from the paper's descriptions (section 3).

Needles are "One of the special magic numbers for KEY is: VALUE." in generated prose or a text file; every answer of a
task is wanted, and accuracy is the share of them that stands in the prediction, as in the paper.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from ragcache.evaluation.case import Case, Passage
from ragcache.evaluation.haystack import CountTokens, Haystack
from ragcache.evaluation.needle import check_lengths
from ragcache.evaluation.registry.documents import joined
from ragcache.evaluation.settings import check_choice

COMMON_WORDS, COMMON_TIMES, RARE_TIMES = 10, 30, 3
FREQUENT_WORDS, ZETA = 3, 2.0
VARIABLES = 5
NEEDLES = 4
_VOWELS, _CONSONANTS = "aeiou", "bdfgklmnprstvz"


@dataclass(frozen=True)
class RulerSettings:
    """task:    one of TASKS, or "all"
    lengths: tokens of the context; passage: tokens of a passage; questions: cases a cell; haystack: a text file
    """

    task: str = "all"
    lengths: tuple[int, ...] = (1024,)
    passage: int = 128
    questions: int = 10
    haystack: str = ""
    seed: int = 0

    def __post_init__(self) -> None:
        check_choice("task", self.task, ("all", *TASKS))
        check_lengths(self.lengths, self.passage, self.questions)


class Draft(NamedTuple):
    """A case before it has a name."""

    question: str
    passages: tuple[Passage, ...]
    answers: tuple[str, ...]


class Maker(NamedTuple):
    """Ingredients of a task."""

    rng: random.Random
    hay: Haystack
    count_tokens: CountTokens
    length: int
    passage: int


def single(make: Maker) -> Draft:
    """One key with one value."""
    return _keyed(make, keys=1, values=1, asked=1)


def multi_key(make: Maker) -> Draft:
    """Four keys of one value each; one is asked for, the others distract."""
    return _keyed(make, keys=NEEDLES, values=1, asked=1)


def multi_value(make: Maker) -> Draft:
    """One key of four values; all are asked for."""
    return _keyed(make, keys=1, values=NEEDLES, asked=1)


def multi_query(make: Maker) -> Draft:
    """Four keys of one value each; all are asked for."""
    return _keyed(make, keys=NEEDLES, values=1, asked=NEEDLES)


def variable_tracking(make: Maker) -> Draft:
    """A chain X1 = V, X2 = X1, ... in order; which variables hold V."""
    names = _distinct(make.rng, VARIABLES, lambda rng: "".join(rng.choices("ABCDEFGHIJKLMNOPQRSTUVWXYZ", k=5)))
    value = str(make.rng.randint(10000, 99999))
    sources = [value, *(f"VAR {name}" for name in names[:-1])]
    depths = sorted(make.rng.random() for _ in names)
    needles = [(f"VAR {n} = {s}.", depth) for n, s, depth in zip(names, sources, depths, strict=True)]
    question = f"Find all variables that are assigned the value {value} in the text above, directly or by a chain."
    return Draft(question, make.hay.with_needles(make.length, needles, make.passage), tuple(names))


def common_words(make: Maker) -> Draft:
    """A list of words: ten come 30 times each, all others 3 times (fewer of each where the length leaves no room)."""
    words = _distinct(make.rng, make.length, _word)
    cost = make.count_tokens(" ".join(words[:200]) + " ") / 200
    room = int(make.length / cost)
    times = max(2, min(COMMON_TIMES, room // (2 * COMMON_WORDS)))
    rare = max(1, min(RARE_TIMES, times // 2))
    common = words[:COMMON_WORDS]
    others = words[COMMON_WORDS : COMMON_WORDS + max(1, (room - COMMON_WORDS * times) // rare)]
    listed = [word for word in common for _ in range(times)] + [word for word in others for _ in range(rare)]
    make.rng.shuffle(listed)
    return Draft(
        f"What are the {COMMON_WORDS} most common words in the list above?", _listed(make, listed), tuple(common)
    )


def frequent_words(make: Maker) -> Draft:
    """A coded text whose words follow a zeta distribution; the three most frequent ones."""
    words = _distinct(make.rng, 50, _word)
    cost = make.count_tokens(" ".join(words) + " ") / len(words)
    room = max(int(make.length / cost), 20)
    weights = [rank**-ZETA for rank in range(1, len(words) + 1)]
    counts = [int(room * weight / sum(weights)) for weight in weights]
    for rank in range(FREQUENT_WORDS, 0, -1):  # the answer must be the answer: no ties at the top
        counts[rank - 1] = max(counts[rank - 1], counts[rank] + 1)
    coded = [word for word, count in zip(words, counts, strict=True) for _ in range(count)]
    make.rng.shuffle(coded)
    question = f"What are the {FREQUENT_WORDS} most frequently appeared words in the coded text above?"
    return Draft(question, _listed(make, coded), tuple(words[:FREQUENT_WORDS]))


TASKS: dict[str, Callable[[Maker], Draft]] = {
    "single": single,
    "multi_key": multi_key,
    "multi_value": multi_value,
    "multi_query": multi_query,
    "variable_tracking": variable_tracking,
    "common_words": common_words,
    "frequent_words": frequent_words,
}


def ruler_cases(settings: RulerSettings, count_tokens: CountTokens, limit: int | None = None) -> list[Case]:
    """`limit` takes the place of `settings.questions`. Same settings and tokenizer, same cases."""
    tasks = list(TASKS) if settings.task == "all" else [settings.task]
    cases = []
    for number in range(limit or settings.questions):
        hay = Haystack(count_tokens, settings.seed + 1000 * number, settings.haystack)
        for task in tasks:
            for length in settings.lengths:
                rng = random.Random(f"ruler/{settings.seed}/{task}/{length}/{number}")
                draft = TASKS[task](Maker(rng, hay, count_tokens, length, settings.passage))
                cell: dict[str, str | int] = {"task": task, "length": length}
                id = f"ruler-{task}-{length}-{number}"
                cases.append(Case(id, draft.question, draft.passages, draft.answers, all_wanted=True, cell=cell))
    return cases


def _keyed(make: Maker, *, keys: int, values: int, asked: int) -> Draft:
    rng = make.rng
    names = _distinct(rng, keys, lambda rng: f"{_word(rng)}-{_word(rng)}")
    numbers = iter(_distinct(rng, keys * values, lambda rng: str(rng.randint(1000000, 9999999))))
    held = {name: [next(numbers) for _ in range(values)] for name in names}
    needles = [
        (f"One of the special magic numbers for {name} is: {number}.", rng.random())
        for name, numbers_of in held.items()
        for number in numbers_of
    ]
    wanted = names[:asked]
    plural = "numbers" if asked * values > 1 else "number"
    verb = "are all the" if asked * values > 1 else "is the"
    question = f"What {verb} special magic {plural} for {joined(wanted)} mentioned in the provided text?"
    answers = tuple(number for name in wanted for number in held[name])
    return Draft(question, make.hay.with_needles(make.length, needles, make.passage), answers)


def _listed(make: Maker, words: list[str]) -> tuple[Passage, ...]:
    """Words in passages of the wanted size; no passage is marked as gold: the answer needs all of them."""
    size = max(1, int(make.passage / (make.count_tokens(" ".join(words[:200]) + " ") / min(200, len(words)))))
    return tuple(Passage(" ".join(words[start : start + size])) for start in range(0, len(words), size))


def _word(rng: random.Random) -> str:
    return "".join(rng.choice(_CONSONANTS) + rng.choice(_VOWELS) for _ in range(3))


def _distinct(rng: random.Random, count: int, draw: Callable[[random.Random], str]) -> list[str]:
    """Different texts of which none is part of another (an answer must not be found inside another word)."""
    found: dict[str, None] = {}
    while len(found) < count:
        found[draw(rng)] = None
    return list(found)
