"""The table of a suite: each measured row, and below it the paper's rows for the same method."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from ragcache.files import atomic_write, write_all
from ragcache_eval.intervals import Estimate
from ragcache_eval.methods import MethodSpec
from ragcache_eval.suites.base import QuestionSet, Suite


@dataclass(frozen=True)
class Measured:
    """A method's scores by column, in 0..1. link_tokens: tokens that it runs after each passage"""

    spec: MethodSpec
    scores: Mapping[str, Estimate]
    link_tokens: int = 0


@dataclass(frozen=True)
class Line:
    """A row of the table, in the paper's units.

    source: "measured" or "paper"; scores: by column, those that there are; average: over the columns, if that says
    anything and none is missing
    """

    source: str
    model: str
    method: str
    scores: Mapping[str, Estimate | float]
    average: float | None

    def to_json(self) -> dict[str, Any]:
        scores = {name: one._asdict() if isinstance(one, Estimate) else one for name, one in self.scores.items()}
        return {
            "source": self.source,
            "model": self.model,
            "method": self.method,
            "scores": scores,
            "average": self.average,
        }


def compare(suite: Suite, columns: Sequence[QuestionSet], model: str, measured: Sequence[Measured]) -> list[Line]:
    """Return the lines of the table with these columns of the suite."""
    lines = []
    for one in measured:
        own = {c.name: _scaled(one.scores[c.name], c.unit) for c in columns if c.name in one.scores}
        lines.append(Line("measured", model, one.spec.label, own, _average(suite, columns, own)))
        for row in suite.paper_rows(one.spec, one.link_tokens):
            there = dict(zip((c.name for c in suite.columns), row.scores, strict=False))
            theirs = {c.name: there[c.name] for c in columns if c.name in there}
            lines.append(Line("paper", row.model, row.method, theirs, _average(suite, columns, theirs)))
    return lines


def _scaled(found: Estimate, unit: float) -> Estimate:
    return found._replace(mean=unit * found.mean, low=unit * found.low, high=unit * found.high)


def _average(suite: Suite, columns: Sequence[QuestionSet], scores: Mapping[str, Estimate | float]) -> float | None:
    if not suite.average or len(scores) < len(columns):
        return None
    return fmean(one.mean if isinstance(one, Estimate) else one for one in scores.values())


def table(suite: Suite, columns: Sequence[QuestionSet], lines: Sequence[Line]) -> list[list[str]]:
    """Return heads and rows as text, a dash for a missing score; the average last."""
    last = ["average"] if suite.average else []
    rows = [["source", "model", "method", *(column.title for column in columns), *last]]
    for line in lines:
        scores = [_text(line.scores.get(column.name), column.unit) for column in columns]
        mean = [_text(line.average, 100)] if suite.average else []
        rows.append([line.source, line.model, line.method, *scores, *mean])
    return rows


def _text(score: Estimate | float | None, unit: float) -> str:
    digits = 3 if unit == 1 else 2
    if score is None:
        return "-"
    if isinstance(score, Estimate):
        return f"{score.mean:.{digits}f} [{score.low:.{digits}f}, {score.high:.{digits}f}]"
    return f"{score:.{digits}f}"


def write_comparison(
    directory: Path, suite: Suite, columns: Sequence[QuestionSet], lines: Sequence[Line], left_out: Mapping[str, str]
) -> list[Path]:
    """SUITE.json and SUITE.md in a directory. left_out: the suite's methods that the model cannot use, with the reason

    Raises StoreFullError, StoreReadOnlyError.
    """
    value, page = to_json(suite, columns, lines, left_out), _page(suite, columns, lines, left_out)
    texts = {f"{suite.name}.json": json.dumps(value, indent=2) + "\n", f"{suite.name}.md": page}
    for name, text in texts.items():
        with atomic_write(directory / name) as file:
            write_all(file, text.encode())
    return [directory / name for name in texts]


def to_json(
    suite: Suite, columns: Sequence[QuestionSet], lines: Sequence[Line], left_out: Mapping[str, str]
) -> dict[str, Any]:
    return {
        "suite": suite.name,
        "table": suite.table,
        "note": suite.note,
        "left_out": dict(left_out),
        "columns": [column.name for column in columns],
        "rows": [line.to_json() for line in lines],
    }


def not_measured(left_out: Mapping[str, str]) -> list[str]:
    """Return a sentence for each method that the model cannot use."""
    return [f"Not measured: {label}. {reason}." for label, reason in left_out.items()]


def _page(suite: Suite, columns: Sequence[QuestionSet], lines: Sequence[Line], left_out: Mapping[str, str]) -> str:
    heads, *rows = table(suite, columns, lines)
    text = "\n".join("| " + " | ".join(row) + " |" for row in (heads, ["---"] * len(heads), *rows))
    about = " ".join([f"The paper's rows are from {suite.table}.", suite.note, *not_measured(left_out)]).strip()
    return f"# {suite.name}\n\n{about}\n\n{text}\n"
