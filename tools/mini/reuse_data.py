"""Training rows for reuse, from the registry: `python -m tools.mini.reuse_data --out FILE --rows N`.

Each line is a JSON object as `ragcache train` reads it, with names and wordings of the training split only. A row's
questions are all single-hop, all two-hop, or lean on the passage before (`draw_leaning` of the registry) with some
plain questions between. Leaning rows have `"shuffle": false`, as the second half of a sentence must follow the first.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from ragcache_eval.registry.contexts import draw_leaning, passage_text
from ragcache_eval.registry.documents import Article
from ragcache_eval.registry.questions import Question
from tools.mini.batches import draw_plain

PASSAGES = (2, 16)
NUM_QUESTIONS = 10
SHARES = {"single": 0.25, "two-hop": 0.3, "leaning": 0.45}
PLAIN_SHARE = 0.2
"""Share of a leaning context's questions that a passage answers by itself."""


class Row(NamedTuple):
    """A row. passages: texts, in order; subjects: the entity of each passage; leaning: whether the order matters"""

    passages: list[str]
    subjects: list[str]
    questions: list[Question]
    leaning: bool


def draw_rows(num_rows: int, seed: int, leaning: float = SHARES["leaning"]) -> Iterator[dict[str, object]]:
    """Yield rows as JSON, the same for the same seed in every process. leaning: share of leaning rows"""
    rng = random.Random(f"reuse/{seed}")
    others = (1 - leaning) / (1 - SHARES["leaning"])
    shares = {kind: leaning if kind == "leaning" else share * others for kind, share in SHARES.items()}
    for _ in range(num_rows):
        row = draw_row(rng, rng.randint(*PASSAGES), _draw_kind(rng, shares))
        yield {
            "type": "qa",
            "passages": row.passages,
            "questions": [{"question": question.text, "answer": question.answer} for question in row.questions],
            "shuffle": not row.leaning,
        }


def draw_row(rng: random.Random, passages: int, kind: str | None = None) -> Row:
    """Return a row of about this many passages. kind: a kind of SHARES; None: a kind that is drawn"""
    kind = kind or _draw_kind(rng, SHARES)
    if kind == "leaning":
        documents, questions = _leaning_row(rng, passages)
    else:
        documents, questions = draw_plain(rng, 2 if kind == "two-hop" else 1, passages, NUM_QUESTIONS)
    texts = [passage_text(rng, document) for document in documents]
    subjects = [document.id.removesuffix(", continued") for document in documents]
    distinct = {question.text: question for question in questions}
    return Row(texts, subjects, list(distinct.values()), kind == "leaning")


def _draw_kind(rng: random.Random, shares: Mapping[str, float]) -> str:
    return rng.choices(list(shares), list(shares.values()))[0]


def _leaning_row(rng: random.Random, passages: int) -> tuple[list[Article], list[Question]]:
    context = draw_leaning(rng, passages)
    pools = [context.plain if rng.random() < PLAIN_SHARE else context.questions for _ in range(NUM_QUESTIONS)]
    return context.passages, [rng.choice(pool) for pool in pools]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=4000)
    parser.add_argument("--leaning", type=float, default=SHARES["leaning"], help="share of rows that lean")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    if not 0 <= arguments.leaning <= 1:
        parser.error(f"--leaning is {arguments.leaning}; it is a share of the rows and must lie in 0..1")
    with arguments.out.open("w", encoding="utf-8") as file:
        for row in draw_rows(arguments.rows, arguments.seed, arguments.leaning):
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
