"""Picture of the quality table: answers against what they cost, in one regime. Needs matplotlib (extra `bench`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

Rows = Sequence[Mapping[str, Any]]
COSTS = {"computed_share": "computed, share of the prompt", "first_token": "first token, of full prefill's"}
BASE = "base"
"""The checkpoint that the others start from."""
MARKS = "osD^vP*X<>phd8"
COLOURS = 10
SIZE = 3.4
WAYS = {
    "last_tokens": "head and tail",
    "kept": "less KV",
    "neighbours": "behind its document",
    "layers": "profiled",
}
"""Options that make a method another one, in words."""


def plot(rows: Rows, path: Path) -> None:
    draw(rows).savefig(path, dpi=110, metadata={"Software": None})


def draw(rows: Rows) -> Figure:
    """A column for each kind of question over the fewest passages, a row for each cost; methods at several budgets
    are lines, which look alike in all panels."""
    least = min(row["passages"] for row in rows)
    shown = [row for row in rows if row["passages"] == least and not row["by"]]
    kinds = list(dict.fromkeys(row["kind"] for row in shown))
    looks = {
        name: {"color": f"C{number % COLOURS}", "marker": MARKS[number % len(MARKS)]}
        for number, name in enumerate(dict.fromkeys(map(_name, shown)))
    }
    figure = Figure(figsize=(SIZE * len(kinds) + 2.5, SIZE * len(COSTS)), layout="constrained", facecolor="white")
    grid = figure.subplots(len(COSTS), len(kinds), squeeze=False, sharey=True)
    for line, (cost, words) in zip(grid, COSTS.items(), strict=True):
        for ax, kind in zip(line, kinds, strict=True):
            _draw(ax, [row for row in shown if row["kind"] == kind], cost, looks)
            ax.set_xlabel(words, fontsize=8)
        line[0].set_ylabel("right answers, of full prefill's", fontsize=8)
    for ax, kind in zip(grid[0], kinds, strict=True):
        ax.set_title(f"{kind}, {least} passages", fontsize=10)
    lines = {name: line for ax in grid[0] for line, name in zip(*ax.get_legend_handles_labels(), strict=True)}
    figure.legend([lines[name] for name in looks], list(looks), loc="outside right center", fontsize=8)
    return figure


def _draw(ax: Axes, rows: Rows, cost: str, looks: Mapping[str, Mapping[str, str]]) -> None:
    series: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        series.setdefault(_name(row), []).append((row[cost], row["relative"]))
    for name, points in series.items():
        xs, ys = zip(*sorted(points), strict=True)
        ax.plot(xs, ys, **looks[name], markersize=5, linewidth=1, label=name)
    ax.axhline(1.0, color="black", linewidth=0.6, linestyle=":")
    ax.set_xscale("log")
    ax.tick_params(labelsize=8)


def _name(row: Mapping[str, Any]) -> str:
    """One line for all budgets of a method."""
    method, _, options = str(row["method"]).partition(":")
    both = ", ".join([method, *(words for option, words in WAYS.items() if option in options)])
    return both if row["checkpoint"] == BASE else f"{row['checkpoint']}: {both}"
