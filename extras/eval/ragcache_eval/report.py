"""A report on a run, over everything and over each cell: means with 95 % intervals for each method."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from ragcache.files import atomic_write, write_all
from ragcache_eval.intervals import Estimate, estimate
from ragcache_eval.journal import Score

QUALITY = (
    "accuracy",
    "exact_match",
    "f1",
    "same_answer",
    "top1_first",
    "top1_answer",
    "kl_first",
    "kl_answer",
)
COSTS = ("kept_share", "computed_share", "prompt_tokens", "encode_s", "place_s", "prefill_s", "ttft_s")


@dataclass(frozen=True)
class Row:
    """A method's results over some of the questions.

    method: label of the method; cell: the properties that the questions share, empty for all questions
    questions: number of questions measured; skipped: number not measured; skipped_because: the first one's reason
    quality: means by metric, where available; costs: medians by name
    """

    method: str
    cell: Mapping[str, str | int]
    questions: int
    skipped: int
    skipped_because: str
    quality: Mapping[str, Estimate]
    costs: Mapping[str, float]

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "quality": {name: found._asdict() for name, found in self.quality.items()}}


def summarise(scores: Sequence[Score], labels: Mapping[str, str]) -> list[Row]:
    """Return rows over all questions, then rows by cell if there are several cells.

    labels: the name of a method in tables, by MethodSpec.key, in the order of the rows
    """
    cells = [dict(cell) for cell in dict.fromkeys(tuple(score.cell.items()) for score in scores)]
    rows = [_row(label, {}, [s for s in scores if s.method == key]) for key, label in labels.items()]
    if len(cells) > 1:
        for cell in cells:
            inside = [score for score in scores if score.cell == cell]
            rows += [_row(label, cell, [s for s in inside if s.method == key]) for key, label in labels.items()]
    return rows


def _row(label: str, cell: Mapping[str, str | int], scores: Sequence[Score]) -> Row:
    measured = [score for score in scores if not score.skipped]
    skipped = [score.skipped for score in scores if score.skipped]
    return Row(
        method=label,
        cell=cell,
        questions=len(measured),
        skipped=len(skipped),
        skipped_because=skipped[0] if skipped else "",
        quality=dict(_quality(measured)),
        costs=dict(_costs(measured)),
    )


def _quality(scores: Sequence[Score]) -> Iterator[tuple[str, Estimate]]:
    for name in QUALITY:
        found = [(getattr(score, name), score.cluster) for score in scores if getattr(score, name) is not None]
        if found:
            yield name, estimate([value for value, _ in found], [cluster for _, cluster in found])


def _costs(scores: Sequence[Score]) -> Iterator[tuple[str, float]]:
    for name in COSTS:
        found = [getattr(score, name) for score in scores if getattr(score, name) is not None]
        if found:
            yield name, float(median(found))


def write_report(directory: Path, name: str, header: Mapping[str, Any], rows: Sequence[Row]) -> list[Path]:
    """Write NAME.json and NAME.md, and return their paths. Raises StoreFullError, StoreReadOnlyError."""
    value = {**header, "rows": [row.to_json() for row in rows]}
    texts = {f"{name}.json": json.dumps(value, indent=2) + "\n", f"{name}.md": markdown(name, header, rows)}
    for file_name, text in texts.items():
        with atomic_write(directory / file_name) as file:
            write_all(file, text.encode())
    return [directory / file_name for file_name in texts]


def markdown(title: str, header: Mapping[str, Any], rows: Sequence[Row]) -> str:
    """Return a page: the run's header, the table over all questions, and a table for each cell."""
    lines = [f"# {title}", "", *(f"- {name}: {_line(value)}" for name, value in header.items() if _is_plain(value)), ""]
    lines += ["Intervals are 95 %. KL is in nats, from full prefill; times are medians, blocks in memory.", ""]
    for cell in dict.fromkeys(tuple(row.cell.items()) for row in rows):
        inside = [row for row in rows if tuple(row.cell.items()) == cell]
        if cell:
            lines += ["## " + ", ".join(f"{name} {value}" for name, value in cell), ""]
        lines += [*table(inside), ""]
    return "\n".join(lines)


def table(rows: Sequence[Row]) -> list[str]:
    """Return the lines of a Markdown table; columns that no row has are left out."""
    metrics = [name for name in QUALITY if any(name in row.quality for row in rows)]
    costs = ["kept_share", "computed_share", "place_s", "prefill_s", "ttft_s"]
    heads = ["method", "questions", *(_TITLES[name] for name in (*metrics, *costs))]
    lines = ["| " + " | ".join(heads) + " |", "|---|" + "---|" * (len(heads) - 1)]
    for row in rows:
        asked = str(row.questions) + (f" ({row.skipped} skipped)" if row.skipped else "")
        cells = [row.method, asked, *(_quality_text(row, name) for name in metrics)]
        lines.append("| " + " | ".join([*cells, *(_cost_text(row, name) for name in costs)]) + " |")
    return lines


_TITLES = {
    "accuracy": "accuracy",
    "exact_match": "exact match",
    "f1": "F1",
    "same_answer": "same answer as full",
    "top1_first": "top-1, first token",
    "top1_answer": "top-1, answer",
    "kl_first": "KL, first token",
    "kl_answer": "KL, answer",
    "kept_share": "KV kept",
    "computed_share": "computed",
    "place_s": "place ms",
    "prefill_s": "prefill ms",
    "ttft_s": "TTFT ms",
}


def _quality_text(row: Row, name: str) -> str:
    if name not in row.quality:
        return "-"
    found = row.quality[name]
    digits = 4 if name.startswith("kl") else 3
    return f"{found.mean:.{digits}f} [{found.low:.{digits}f}, {found.high:.{digits}f}]"


def _cost_text(row: Row, name: str) -> str:
    if name not in row.costs:
        return "-"
    return f"{1000 * row.costs[name]:.1f}" if name.endswith("_s") else f"{row.costs[name]:.3f}"


def _line(value: Any) -> str:
    return str(value).replace("\n", "\\n")


def _is_plain(value: Any) -> bool:
    return isinstance(value, str | int | float) and not isinstance(value, bool)
