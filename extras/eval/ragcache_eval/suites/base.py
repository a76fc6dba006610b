"""A suite is a paper's table as data: the sets that are its columns, its methods, and its rows."""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from ragcache.errors import check_choice
from ragcache_eval.case import Case
from ragcache_eval.methods import MethodSpec
from ragcache_eval.question_files import QuestionLine

Cut = Callable[[str], Sequence[str]]
"""Cuts a long text into passages."""
Form = Callable[[Mapping[str, Any], str, Cut], QuestionLine | None]
"""Reads a row of a set: its fields, where it stands, and how to cut. None for a row that asks nothing."""


@dataclass(frozen=True)
class Download:
    """The arguments of `datasets.load_dataset`."""

    path: str
    config: str | None = None
    split: str = "train"
    data_files: str | None = None
    revision: str | None = None


@dataclass(frozen=True)
class QuestionSet:
    """A column of a table: questions from the rows of a file or of the hub.

    name:       in --data and in file names; title: the paper's name; unit: the paper's number for a score of 1
    metric:     of set_metrics.METRICS
    max_tokens: longest answer
    asked:      the instruction after the passages, with {question} in it; "": the bare question
    form:       reads a row
    files:      names that its file may have in a directory, without their endings
    download:   None: there is no public copy in this form
    by_hand:    where a person can download the file, for messages
    """

    name: str
    title: str
    unit: float = 100.0
    _: KW_ONLY
    metric: str
    max_tokens: int
    asked: str = ""
    form: Form | None = None
    files: tuple[str, ...] = ()
    download: Download | None = None
    by_hand: str = ""

    @property
    def question_format(self) -> str | None:
        """Return the format for `prompt_format`: only the question with instructions, else the model's own format."""
        return "{question}" if self.asked else None

    def ask(self, case: Case) -> Case:
        """Return the case with this set's words and metric."""
        question = self.asked.replace("{question}", case.question) if self.asked else case.question
        return replace(case, question=question, metric=self.metric)


class PaperRow(NamedTuple):
    """scores: in the order of the suite's columns, in the paper's units; the last columns may have none"""

    model: str
    method: str
    scores: tuple[float, ...]


@cache
def _published() -> list[tuple[str, PaperRow]]:
    """Return the rows that the papers print, each with its suite: suite, model, method and scores by column."""
    with Path(__file__).with_name("published.csv").open(encoding="utf-8", newline="") as file:
        _, *lines = csv.reader(file)
    return [(suite, PaperRow(model, method, tuple(map(float, scores)))) for suite, model, method, *scores in lines]


@dataclass(frozen=True)
class Suite:
    """A paper's table.

    table:   its number in the paper
    methods: as `parse_methods` reads them; methods that the model cannot use are left out, and named
    names:   the paper's methods by our label or name, or by name and link tokens, as in "link K=5"
    average: whether the mean over the columns says anything
    note:    differences from the paper
    """

    name: str
    table: str
    columns: tuple[QuestionSet, ...]
    methods: tuple[str, ...] = ()
    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    average: bool = False
    note: str = ""

    @property
    def rows(self) -> tuple[PaperRow, ...]:
        """Return the paper's rows; none if it has none for all of these columns."""
        return tuple(row for suite, row in _published() if suite == self.name)

    def chosen(self, names: Sequence[str]) -> tuple[QuestionSet, ...]:
        """Return the columns of these names, by default all. Raises ConfigError for an unknown name."""
        for name in names:
            check_choice(f"--data of suite {self.name}", name, [column.name for column in self.columns])
        return tuple(column for column in self.columns if not names or column.name in names)

    def paper_rows(self, spec: MethodSpec, link_tokens: int = 0) -> list[PaperRow]:
        """Return the paper's rows for a method of ours. link_tokens: tokens that it runs after each passage"""
        keys = (spec.label, f"{spec.name} K={link_tokens}", spec.name)
        theirs = next((self.names[key] for key in keys if key in self.names), ())
        return [row for row in self.rows if row.method in theirs]
