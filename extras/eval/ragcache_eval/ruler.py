"""RULER's synthetic tasks (Hsieh et al. 2024, arXiv 2404.06654), written from the paper's descriptions (section 3).

Needles are "One of the special magic numbers for KEY is: VALUE." in generated prose or a text file, in noise (the same
five sentences again and again), or among other needles; keys are words or UUIDs, values numbers or UUIDs. A task
requires all its answers, and accuracy is the share that the prediction contains, as in the paper. These are 11 of
the 13 tasks; `ruler_qa` has the two over public questions.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle
from typing import NamedTuple

from ragcache_eval.case import Case, CasePassage
from ragcache_eval.haystack import CountTokens, Haystack, prose
from ragcache_eval.needle import check_lengths
from ragcache_eval.registry.documents import joined
from ragcache_eval.settings import check_setting

COMMON_WORDS, COMMON_TIMES, RARE_TIMES = 10, 30, 3
FREQUENT_WORDS, ZETA = 3, 2.0
VARIABLES = 5
NEEDLES = 4
NOISE = ("The lamp is lit.", "The door is shut.", "The road is wet.", "Off we go.", "Round and round again.")
_VOWELS, _CONSONANTS = "aeiou", "bdfgklmnprstvz"

Draw = Callable[[random.Random], str]


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
        check_setting("task", self.task, ("all", *TASKS))
        check_lengths(self.lengths, self.passage, self.questions)


class Draft(NamedTuple):
    """A case before it has a name."""

    question: str
    passages: tuple[CasePassage, ...]
    answers: tuple[str, ...]


class Maker(NamedTuple):
    """Ingredients of a task."""

    rng: random.Random
    hay: Haystack
    count_tokens: CountTokens
    length: int
    passage: int


def single_noise(make: Maker) -> Draft:
    """Draft a key with a value, in noise."""
    return _keyed(make, keys=1, values=1, asked=1, hay=cycle(NOISE))


def single(make: Maker) -> Draft:
    """Draft a key with a value."""
    return _keyed(make, keys=1, values=1, asked=1)


def single_uuid(make: Maker) -> Draft:
    """Draft a key whose value is a UUID."""
    return _keyed(make, keys=1, values=1, asked=1, value=_uuid, what="uuid")


def multi_key(make: Maker) -> Draft:
    """Draft four keys with a value each; the question names a single key, the others distract."""
    return _keyed(make, keys=NEEDLES, values=1, asked=1)


def multi_key_lines(make: Maker) -> Draft:
    """Draft only needles; the question names a single key."""
    return _keyed(make, keys=1, values=1, asked=1, hay=_needles(make.rng, _key, _number, "number"))


def multi_key_uuids(make: Maker) -> Draft:
    """Draft only needles, whose keys and values are UUIDs; the question names a single key."""
    hay = _needles(make.rng, _uuid, _uuid, "uuid")
    return _keyed(make, keys=1, values=1, asked=1, hay=hay, key=_uuid, value=_uuid, what="uuid")


def multi_value(make: Maker) -> Draft:
    """Draft a key with four values; the question is about all."""
    return _keyed(make, keys=1, values=NEEDLES, asked=1)


def multi_query(make: Maker) -> Draft:
    """Draft four keys with a value each; the question is about all."""
    return _keyed(make, keys=NEEDLES, values=1, asked=NEEDLES)


def variable_tracking(make: Maker) -> Draft:
    """Draft a chain X1 = V, X2 = X1, ... in order, in noise; the question is which variables hold V."""
    names = _distinct(make.rng, VARIABLES, lambda rng: "".join(rng.choices("ABCDEFGHIJKLMNOPQRSTUVWXYZ", k=5)))
    value = str(make.rng.randint(10000, 99999))
    sources = [value, *(f"VAR {name}" for name in names[:-1])]
    depths = sorted(make.rng.random() for _ in names)
    needles = [(f"VAR {n} = {s}.", depth) for n, s, depth in zip(names, sources, depths, strict=True)]
    question = f"Find all variables that are assigned the value {value} in the text above, directly or by a chain."
    hay = Haystack(make.count_tokens, cycle(NOISE))
    return Draft(question, hay.with_needles(make.length, needles, make.passage), tuple(names))


def common_words(make: Maker) -> Draft:
    """Draft a list of words: ten come 30 times each, all others 3 times (fewer if the length leaves no room)."""
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
    """Draft a coded text whose words follow a zeta distribution; the answers are the three most frequent words."""
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
    "single_noise": single_noise,
    "single_uuid": single_uuid,
    "multi_key": multi_key,
    "multi_key_lines": multi_key_lines,
    "multi_key_uuids": multi_key_uuids,
    "multi_value": multi_value,
    "multi_query": multi_query,
    "variable_tracking": variable_tracking,
    "common_words": common_words,
    "frequent_words": frequent_words,
}


def ruler_cases(settings: RulerSettings, count_tokens: CountTokens, limit: int | None = None) -> list[Case]:
    """Return the cases. `limit` overrides `settings.questions`. The same settings and tokenizer give the same cases."""
    tasks = list(TASKS) if settings.task == "all" else [settings.task]
    cases = []
    for number in range(limit or settings.questions):
        hay = Haystack(count_tokens, prose(settings.seed + 1000 * number, settings.haystack))
        for task in tasks:
            for length in settings.lengths:
                rng = random.Random(f"ruler/{settings.seed}/{task}/{length}/{number}")
                draft = TASKS[task](Maker(rng, hay, count_tokens, length, settings.passage))
                cell: dict[str, str | int] = {"task": task, "length": length}
                id = f"ruler-{task}-{length}-{number}"
                cases.append(Case(id, draft.question, draft.passages, draft.answers, all_wanted=True, cell=cell))
    return cases


def _needle(what: str, key: str, value: str) -> str:
    return f"One of the special magic {what}s for {key} is: {value}."


def _needles(rng: random.Random, key: Draw, value: Draw, what: str) -> Iterator[str]:
    """Yield endless needles to hide another needle among."""
    while True:
        yield _needle(what, key(rng), value(rng))


def _key(rng: random.Random) -> str:
    return f"{_word(rng)}-{_word(rng)}"


def _number(rng: random.Random) -> str:
    return str(rng.randint(1000000, 9999999))


def _uuid(rng: random.Random) -> str:
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def _keyed(
    make: Maker,
    *,
    keys: int,
    values: int,
    asked: int,
    hay: Iterator[str] | None = None,
    key: Draw = _key,
    value: Draw = _number,
    what: str = "number",
) -> Draft:
    """Draft needles.

    hay: overrides the maker's; key, value: replace words and numbers; what: the text's word for a value
    """
    rng = make.rng
    names = _distinct(rng, keys, key)
    held = iter(_distinct(rng, keys * values, value))
    found = {name: [next(held) for _ in range(values)] for name in names}
    needles = [(_needle(what, name, one), rng.random()) for name, ones in found.items() for one in ones]
    wanted = names[:asked]
    several = asked * values > 1
    verb, plural = ("are all the", f"{what}s") if several else ("is the", what)
    question = f"What {verb} special magic {plural} for {joined(wanted)} mentioned in the provided text?"
    answers = tuple(one for name in wanted for one in found[name])
    stack = Haystack(make.count_tokens, hay) if hay else make.hay
    return Draft(question, stack.with_needles(make.length, needles, make.passage), answers)


def _listed(make: Maker, words: list[str]) -> tuple[CasePassage, ...]:
    """Return words in passages of the wanted size; no passage is marked as gold, because the answer needs them all."""
    size = max(1, int(make.passage / (make.count_tokens(" ".join(words[:200]) + " ") / min(200, len(words)))))
    return tuple(CasePassage(" ".join(words[start : start + size])) for start in range(0, len(words), size))


def _word(rng: random.Random) -> str:
    return "".join(rng.choice(_CONSONANTS) + rng.choice(_VOWELS) for _ in range(3))


def _distinct(rng: random.Random, count: int, draw: Draw) -> list[str]:
    """Different texts of which none is part of another (an answer must not be found inside another word)."""
    found: dict[str, None] = {}
    while len(found) < count:
        found[draw(rng)] = None
    return list(found)
