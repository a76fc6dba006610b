"""The work behind the quality table: a few questions of one cell, read by every method of one checkpoint.

Units are independent, so that processes share them and a run that was stopped goes on with those that are left.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import torch

import ragcache as rc
from ragcache.errors import ConfigError
from ragcache.kv.exact import Exact
from ragcache.models.card import eos_token_ids
from ragcache.prompt import encode_text, prompt_format
from ragcache_eval.case import Case
from ragcache_eval.methods import FULL, MethodSpec
from ragcache_eval.reading import PromptReader, forced_logits
from ragcache_eval.registry import MAX_ANSWER_TOKENS, PagesSettings, pages_cases

UNIT_QUESTIONS = 50


class Cell(NamedTuple):
    """What a row of the table is about. kind: one of the registry's PAGE_KINDS; passages: in a context."""

    kind: str
    passages: int


class Reads(NamedTuple):
    """What one method made of the questions of a unit, one value a question.

    right:    1 where the whole answer is the expected one, else 0
    computed: tokens that ran, of those that the prompt has, mean over the layers
    kept:     tokens that were held after it, likewise
    seconds:  to the first token, with blocks in memory

    Full prefill is timed and counted once a context: of further questions over it only the suffix runs, which gives the
    same answers, and the first one's figures stand for all.
    """

    right: list[int]
    computed: list[float]
    kept: list[float]
    seconds: list[float]

    def add(self, right: bool, computed: float, kept: float, seconds: float) -> None:
        for column, value in zip(self, (int(right), computed, kept, seconds), strict=True):
            column.append(value)


@dataclass(frozen=True)
class Unit:
    """Questions `start` to `start + count` of a cell drawn with `seed`, `asked` a context, read by `methods` on one
    checkpoint."""

    directory: str
    fingerprint: str
    cell: Cell
    seed: int
    start: int
    count: int
    methods: tuple[MethodSpec, ...]
    asked: int = 1

    def key(self, method: MethodSpec) -> str:
        """Names a method's answers: what they depend on, and nothing else."""
        return json.dumps([self.fingerprint, method.key, *self.cell, self.seed, self.asked, self.start, self.count])


def units_of(
    directory: str,
    fingerprint: str,
    cells: Sequence[Cell],
    methods: Sequence[MethodSpec],
    questions: int,
    seed: int,
    asked: int = 1,
) -> Iterator[Unit]:
    for cell in cells:
        for start in range(0, questions, UNIT_QUESTIONS):
            count = min(UNIT_QUESTIONS, questions - start)
            yield Unit(directory, fingerprint, cell, seed, start, count, tuple(methods), asked)


def run_unit(unit: Unit) -> dict[str, Reads]:
    """By key, what each method made of the unit's questions."""
    lm = _model(unit.directory)
    found = {unit.key(spec): Reads([], [], [], []) for spec in unit.methods}
    cases = cases_of(unit.cell, unit.start + unit.count, unit.seed, unit.asked)[unit.start :]
    for _, asked in groupby(cases, lambda case: case.cluster):
        _read_context(lm, unit, list(asked), found)
    return found


def _read_context(lm: rc.LanguageModel, unit: Unit, asked: Sequence[Case], found: dict[str, Reads]) -> None:
    """Questions over the same passages: blocks are made once, and full prefill reads the passages once."""
    form = prompt_format(lm.tokenizer)
    reader = PromptReader.of(lm, asked[0], form, MAX_ANSWER_TOKENS)
    whole: Exact | None = None
    for case in asked:
        reader = reader.ask(form.suffix_ids(lm.tokenizer, case.question))
        for spec in unit.methods:
            reads = found[unit.key(spec)]
            if spec.name == FULL and whole is not None:
                fused = rc.fuse(lm, reader.prompt, spec.method(), exact=whole, reserve_tokens=MAX_ANSWER_TOKENS)
                figures = reads.computed[-1], reads.kept[-1], reads.seconds[-1]
            else:
                fused, _ = reader.read(spec.method(), spec.recipe, kept=spec.kept, neighbours=spec.neighbours)
                figures = _figures(fused)
            reads.add(answers(lm, fused, case), *figures)
            if spec.name == FULL and whole is None and len(asked) > 1:
                whole = fused.share()
            fused.cache.release()


def _figures(fused: rc.FuseOutput) -> tuple[float, float, float]:
    """Shares computed and kept, and seconds to the first token."""
    computed, kept = (fmean(tokens) / fused.prompt_tokens for tokens in (fused.computed_tokens, fused.kept_tokens))
    return round(computed, 6), round(kept, 6), round(fused.timings.total_s, 6)


def answers(lm: rc.LanguageModel, fused: rc.FuseOutput, case: Case) -> bool:
    """Whether the greedy answer is the whole sentence that the bundled models learned, and ends there."""
    return would_write(lm, fused, [*encode_text(lm.tokenizer, case.answers[-1]), min(eos_token_ids(lm))])


def would_write(lm: rc.LanguageModel, fused: rc.FuseOutput, ids: Sequence[int]) -> bool:
    """Whether the greedy answer begins with these ids: one pass over them all tells, without writing."""
    logits = forced_logits(lm, fused, ids).clone()
    logits[:, sorted(fused.reserved_ids)] = -torch.inf
    return logits.argmax(-1).tolist() == list(ids)


@lru_cache(maxsize=1)
def _model(directory: str) -> rc.LanguageModel:
    torch.set_num_threads(1)
    return rc.load_lm(directory, dtype="float32")


@lru_cache(maxsize=4)
def cases_of(cell: Cell, questions: int, seed: int, asked: int = 1) -> list[Case]:
    """asked: over a context, at most"""
    return pages_cases(PagesSettings(cell.kind, (cell.passages,), questions, seed, asked))


class Answers:
    """Answers by key, kept in a file of JSON lines. Raises ConfigError for a file that holds something else."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.found: dict[str, Reads] = {}
        data = path.read_bytes() if path.exists() else b""
        whole = data[: data.rfind(b"\n") + 1]  # a run that was killed leaves half a line
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                row = json.loads(line)
                key = row.pop("key")
                self.found[key] = Reads(**row)
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ConfigError(f"{path}, line {number}: no answers of a unit ({error}); delete it") from error
        if len(whole) < len(data):
            os.truncate(path, len(whole))

    def add(self, found: dict[str, Reads]) -> None:
        self.found.update(found)
        with self.path.open("ab") as file:
            for key, reads in found.items():
                file.write(json.dumps({"key": key, **reads._asdict()}).encode() + b"\n")

    def missing(self, unit: Unit) -> Unit | None:
        """The unit with the methods whose answers are not there."""
        left = tuple(spec for spec in unit.methods if unit.key(spec) not in self.found)
        return Unit(**{**unit.__dict__, "methods": left}) if left else None

    def of(self, units: Sequence[Unit], method: MethodSpec) -> Reads:
        """All that a method read over units, in order."""
        parts = [self.found[unit.key(method)] for unit in units]
        return Reads(*([one for part in column for one in part] for column in zip(*parts, strict=True)))


def answer_all(units: Sequence[Unit], answers: Answers, processes: int) -> Iterator[int]:
    """Do what is missing; yields how many units are done after each. Units of a checkpoint stay together."""
    left = [unit for one in units if (unit := answers.missing(one)) is not None]
    done = len(units) - len(left)
    yield done
    if processes < 2 or len(left) < 2:
        for unit in left:
            answers.add(run_unit(unit))
            yield (done := done + 1)
        return
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        for found in pool.map(run_unit, left):
            answers.add(found)
            yield (done := done + 1)
