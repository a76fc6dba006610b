"""Contexts of pages to train on, and as training rows: `python -m tools.mini.page_data --out FILE --rows N`.

One JSON object a line, of the schema that `ragcache train` reads. Names and wordings of the training split only. Pages
stay in their order: what leans on the page before must stand behind it.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from ragcache_eval.registry import ARTICLES, PAGE_KINDS, PageQuestion, draw_pages

KIND_SHARES = dict(zip(PAGE_KINDS, (0.25, 0.15, 0.35, 0.1, 0.15), strict=True))


class Size(NamedTuple):
    """passages: least and largest number in a context; articles: of a page; batch_pages: of a batch, about;
    num_questions: of a context."""

    passages: tuple[int, int]
    articles: tuple[int, int]
    batch_pages: int
    num_questions: int

    def draw_passages(self, rng: random.Random) -> int:
        """Few more often than many: tokens of every number are about as many."""
        least, most = self.passages
        return round(math.exp(rng.uniform(math.log(least), math.log(most))))


SMALL = Size((4, 8), (1, 2), 24, 6)
LARGE = Size((2, 16), ARTICLES, 12, 12)
SMALL_SHARE = 0.4
"""Share of small pages, on which a model sees many more sentences that lean in the same time."""


def draw_size(rng: random.Random) -> Size:
    return SMALL if rng.random() < SMALL_SHARE else LARGE


def draw_questions(rng: random.Random, questions: Sequence[PageQuestion], count: int) -> list[PageQuestion]:
    """`count` of them, kinds by their shares; none twice before all were asked."""
    found: list[PageQuestion] = []
    left: list[PageQuestion] = []
    while len(found) < count:
        left = left or list(questions)
        kinds = sorted({one.kind for one in left})
        kind = rng.choices(kinds, [KIND_SHARES[one] for one in kinds])[0]
        found.append(rng.choice([one for one in left if one.kind == kind]))
        left.remove(found[-1])
    return found


def draw_rows(num_rows: int, seed: int, most: int = LARGE.passages[1]) -> Iterator[dict[str, object]]:
    """The same rows for the same seed, in every process. most: passages of a row; rows of more are passed over."""
    return islice((row for row in _all_rows(seed) if len(row["passages"]) <= most), num_rows)


def _all_rows(seed: int) -> Iterator[dict[str, Any]]:
    rng = random.Random(f"pages/{seed}")
    while True:
        size = draw_size(rng)
        pages = draw_pages(rng, size.draw_passages(rng), articles=size.articles)
        asked = dict.fromkeys(one.question for one in draw_questions(rng, pages.questions, size.num_questions))
        questions = [{"question": question.text, "answer": question.answer} for question in asked]
        yield {"type": "qa", "passages": pages.passages, "questions": questions, "shuffle": False}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=1000)
    least, most = LARGE.passages
    parser.add_argument("--passages", type=int, default=most, choices=range(least, most + 1), help="of a row, at most")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    with arguments.out.open("w", encoding="utf-8") as file:
        for row in draw_rows(arguments.rows, arguments.seed, arguments.passages):
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
