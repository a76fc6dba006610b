"""A picture of a run: answers against cost, and the results by cell.

Needs matplotlib.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ragcache.errors import ConfigError
from ragcache_eval.report import Row

METRICS = ("accuracy", "same_answer", "top1_answer")


def plot(rows: Sequence[Row], path: Path, title: str) -> None:
    """Write a PNG. Raises ConfigError where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("plots need matplotlib; pip install 'ragcache-kv[eval]', or leave the plot out") from error
    whole = [row for row in rows if not row.cell]
    metric = next((name for name in METRICS if any(name in row.quality for row in whole)), METRICS[0])
    cells = [row for row in rows if row.cell and metric in row.quality]
    count = 1 + bool(cells)
    figure = Figure(figsize=(7, 4 * count), layout="constrained")
    axes = list(figure.subplots(count, 1, squeeze=False)[:, 0])
    _cost_points(axes[0], [row for row in whole if metric in row.quality], metric)
    if cells:
        _lines(axes[1], cells, metric)
    figure.suptitle(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, metadata={"Software": None})


def _cost_points(ax: Any, rows: Sequence[Row], metric: str) -> None:
    """Draw a point for each method: share of the prompt that ran, and the metric with its interval."""
    for row in rows:
        found, share = row.quality[metric], row.costs.get("computed_share", 0.0)
        below, above = max(0.0, found.mean - found.low), max(0.0, found.high - found.mean)
        ax.errorbar(share, found.mean, yerr=[[below], [above]], fmt="o", capsize=3)
        ax.annotate(f" {row.method}", (share, found.mean), fontsize=8)
    ax.set_xlabel("tokens computed / tokens of the prompt")
    ax.set_ylabel(metric.replace("_", " "))
    ax.grid(alpha=0.3)


def _lines(ax: Any, rows: Sequence[Row], metric: str) -> None:
    names = [", ".join(f"{key} {value}" for key, value in cell) for cell in _cells(rows)]
    for label in dict.fromkeys(row.method for row in rows):
        found = {tuple(row.cell.items()): row.quality[metric].mean for row in rows if row.method == label}
        ax.plot(range(len(names)), [found.get(cell, float("nan")) for cell in _cells(rows)], marker="o", label=label)
    ax.set_xticks(range(len(names)), names, rotation=30, ha="right", fontsize=7)
    ax.set_ylabel(metric.replace("_", " "))
    ax.grid(alpha=0.3)
    ax.legend(fontsize=7)


def _cells(rows: Sequence[Row]) -> list[tuple[tuple[str, str | int], ...]]:
    return list(dict.fromkeys(tuple(row.cell.items()) for row in rows))
