"""RULER's two tasks over public questions (SQuAD, HotpotQA): a question's passages among others of the same set."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from ragcache_eval.case import Case, CasePassage
from ragcache_eval.haystack import CountTokens
from ragcache_eval.question_files import QuestionLine

Pool = Mapping[CasePassage, Any]
"""Every passage, with the article that it belongs to; None where the set names none."""


def filled_cases(
    lines: Sequence[QuestionLine], length: int, count_tokens: CountTokens, limit: int | None = None, seed: int = 0
) -> list[Case]:
    """Return the first `limit` questions, each with as many passages as `length` tokens hold, in an order drawn by
    `seed`.

    A question keeps its own passages, whatever their length; then come those of the same `meta.article`, then any
    others.
    """
    pool = {_plain(passage): line.meta.get("article") for line in lines for passage in line.case.passages}
    size = cache(lambda passage: count_tokens(passage.rendered()))
    cases = []
    for line in lines[:limit]:
        rng = random.Random(f"ruler_qa/{seed}/{line.case.id}")
        chosen = list(line.case.passages)
        room = length - sum(size(_plain(passage)) for passage in chosen)
        for passage in _others(line, pool, rng):
            room -= size(passage)
            if room < 0:
                break
            chosen.append(passage._replace(is_gold=False))
        rng.shuffle(chosen)
        cases.append(replace(line.case, passages=tuple(chosen)))
    return cases


def _plain(passage: CasePassage) -> CasePassage:
    """Return the passage without its gold mark, so that it is the same for every question."""
    return passage._replace(is_gold=None)


def _others(line: QuestionLine, pool: Pool, rng: random.Random) -> Iterator[CasePassage]:
    """Yield passages that are not the question's own; near ones first, each kind in an order drawn anew."""
    own = {_plain(passage) for passage in line.case.passages}
    article = line.meta.get("article")
    others = [(passage, article is not None and where == article) for passage, where in pool.items()]
    for wanted in (True, False):
        some = [passage for passage, is_near in others if is_near is wanted and passage not in own]
        yield from rng.sample(some, len(some))
