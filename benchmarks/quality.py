"""Answer quality of the bundled model: exact match under each fusion method, on held-out entities and wordings.

python -m benchmarks.quality                                # 1,000 questions a cell, 8 passages
python -m benchmarks.quality --questions 200 --passages 4 8 16

Every method reads the same prompts, cut into prefix, passages and question, and decodes greedily. An answer counts
when its whole text is the expected one; a two-hop answer names the entity in between as well.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

import ragcache as rc
from benchmarks.environment import environment
from benchmarks.report import RESULTS, Goal, Result, show, write
from ragcache.models.decoding import Sampling, decode, eos_token_ids
from ragcache.models.loading import resolve
from ragcache.training.evaluate import MAX_ANSWER_TOKENS, Case, draw_cases

SINGLE_HOP_GOAL, TWO_HOP_GOAL = 0.98, 0.90
STATED_PASSAGES = 8
STATED_QUESTIONS = 500


@dataclass(frozen=True)
class Cell:
    """low, high: 95 % Wilson score interval of the share of right answers."""

    method: str
    recipe: str
    passages: int
    hops: int
    questions: int
    exact_match: float
    low: float
    high: float


def wilson(right: int, asked: int) -> tuple[float, float]:
    """95 % interval of a share (Wilson 1927); holds its level near 0 and 1, where the normal one does not."""
    z, share = 1.959964, right / asked
    middle = share + z * z / (2 * asked)
    half = z * (share * (1 - share) / asked + z * z / (4 * asked * asked)) ** 0.5
    scale = 1 + z * z / asked
    return max(0.0, (middle - half) / scale), min(1.0, (middle + half) / scale)


def answer(lm: rc.LanguageModel, tokenizer: Tokenizer, case: Case, method: str, recipe: str) -> str:
    prompt = rc.Prompt(case.prefix_ids, case.chunk_ids, case.suffix_ids)
    fused = rc.fuse(lm, prompt, method=method, recipe=recipe, reserve_tokens=MAX_ANSWER_TOKENS)
    sampling = Sampling(max_tokens=MAX_ANSWER_TOKENS)
    ids = decode(lm, fused.cache, fused.next_logits, prompt.num_tokens, sampling, eos_ids=eos_token_ids(lm))
    text = tokenizer.decode(list(ids), skip_special_tokens=True)
    fused.cache.release()
    return str(text)


def measure(lm: rc.LanguageModel, tokenizer: Tokenizer, cases: Sequence[Case], method: str, recipe: str) -> Cell:
    right = sum(answer(lm, tokenizer, case, method, recipe) == case.answer for case in cases)
    low, high = wilson(right, len(cases))
    passages, hops = len(cases[0].chunk_ids), cases[0].question.hops
    return Cell(method, recipe, passages, hops, len(cases), right / len(cases), low, high)


def variants(methods: Sequence[str]) -> list[tuple[str, str]]:
    """(method, recipe): each recipe that a method takes; full prefill has none."""
    return [(m, r) for m in methods for r in (rc.METHODS[m].recipes if rc.METHODS[m].reuses_blocks else ("isolated",))]


def main(arguments: Sequence[str] | None = None) -> Result:
    parser = argparse.ArgumentParser("benchmarks.quality", description=__doc__)
    parser.add_argument("--model", default="mini")
    parser.add_argument("--questions", type=int, default=1000)
    parser.add_argument("--passages", type=int, nargs="+", default=[STATED_PASSAGES])
    parser.add_argument("--methods", nargs="+", default=list(rc.METHODS), choices=list(rc.METHODS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = sys.argv[1:] if arguments is None else arguments
    options = parser.parse_args(given)
    where = environment("benchmarks.quality", given, torch.device("cpu"))
    lm = rc.load_lm(options.model)
    tokenizer = Tokenizer.from_file(str(Path(resolve(options.model)) / "tokenizer.json"))
    cells = []
    for passages in options.passages:
        for hops in (1, 2):
            cases = draw_cases(
                tokenizer, hops=hops, num_cases=options.questions, num_passages=passages, seed=options.seed
            )
            for method, recipe in variants(options.methods):
                cells.append(measure(lm, tokenizer, cases, method, recipe))
                print(cells[-1], flush=True)
    settings = {name: value for name, value in vars(options).items() if name != "out"}
    result = Result("quality", settings, where, {}, {}, {"cells": [asdict(cell) for cell in cells]}, _goals(cells))
    write(result, options.out)
    show(result)
    return result


def _goals(cells: Sequence[Cell]) -> list[Goal]:
    limits = {1: SINGLE_HOP_GOAL, 2: TWO_HOP_GOAL}
    return [
        Goal(
            f"exact match under full, {cell.hops}-hop, {cell.passages} passages",
            "at least",
            limits[cell.hops],
            cell.exact_match,
            applies=cell.passages == STATED_PASSAGES and cell.questions >= STATED_QUESTIONS,
        )
        for cell in cells
        if cell.method == "full"
    ]


if __name__ == "__main__":
    main()
