"""What a suite is: a paper's table as data. The sets that are its columns, its methods, and its rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
class Column:
    """name: in --data and in file names; title: what the paper calls it; unit: what it writes for a score of 1"""

    name: str
    title: str
    unit: float = 100.0


@dataclass(frozen=True)
class Download:
    """The arguments of `datasets.load_dataset`."""

    path: str
    config: str | None = None
    split: str = "train"
    data_files: str | None = None
    revision: str | None = None


@dataclass(frozen=True, kw_only=True)
class QuestionSet(Column):
    """A column whose questions are asked here: generated, or rows of a file or of the hub.

    metric:     of set_metrics.METRICS
    max_tokens: longest answer
    asked:      what the model is told behind the passages, with {question} in it; "": the bare question
    generated:  a source of `load_cases` with {length} and {passage} in it, in place of all that follows
    form:       reads a row
    files:      names that its file may have in a directory, without their endings
    download:   None: there is no public copy in this form
    by_hand:    where a person gets the file, for messages
    questions:  the first so many rows, where the paper takes no more
    filled:     passages of other questions are added up to the length asked for (RULER)
    """

    metric: str
    max_tokens: int
    asked: str = ""
    generated: str = ""
    form: Form | None = None
    files: tuple[str, ...] = ()
    download: Download | None = None
    by_hand: str = ""
    questions: int | None = None
    filled: bool = False

    @property
    def question_format(self) -> str | None:
        """For `prompt_format`: what is asked says it all, or the model's own format."""
        return "{question}" if self.asked else None

    def ask(self, case: Case) -> Case:
        """The case with this set's words and metric."""
        question = self.asked.replace("{question}", case.question) if self.asked else case.question
        return replace(case, question=question, metric=self.metric)


class PaperRow(NamedTuple):
    """scores: in the order of the suite's columns, in the paper's units; the last columns may have none"""

    model: str
    method: str
    scores: tuple[float, ...]


@dataclass(frozen=True)
class Suite:
    """A paper's table.

    table:   where it stands
    methods: as `parse_methods` reads them; those that the model cannot use are left out, and named
    names:   the paper's methods by label or name of ours, or by name and link tokens, as in "link K=5"
    average: whether the mean over the columns says anything
    note:    what is not as in the paper
    """

    name: str
    table: str
    columns: tuple[Column, ...]
    methods: tuple[str, ...] = ()
    rows: tuple[PaperRow, ...] = ()
    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    average: bool = False
    note: str = ""

    def chosen(self, names: Sequence[str]) -> tuple[Column, ...]:
        """The columns of these names, all where there are none. Raises ConfigError for a name that is not there."""
        for name in names:
            check_choice(f"--data of suite {self.name}", name, [column.name for column in self.columns])
        return tuple(column for column in self.columns if not names or column.name in names)

    def paper_rows(self, spec: MethodSpec, link_tokens: int = 0) -> list[PaperRow]:
        """What the paper has for a method of ours. link_tokens: that it runs behind each passage"""
        keys = (spec.label, f"{spec.name} K={link_tokens}", spec.name)
        theirs = next((self.names[key] for key in keys if key in self.names), ())
        return [row for row in self.rows if row.method in theirs]
