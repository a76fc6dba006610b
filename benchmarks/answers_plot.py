"""Picture of real models' answers for docs/results.md: `python -m benchmarks.answers_plot RESULT.json PICTURE.png`.

Reads what `python -m benchmarks.answers` wrote. Needs matplotlib (extra `bench`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.answers_report import LEAST_RELATIVE, MOST_KL, Interval, Row
from benchmarks.plots import draw_file
from ragcache_eval.methods import FULL
from ragcache_eval.runner import NO_PASSAGES

COLOURS = {"isolated": "#1f6f8b", "prefix": "#c7843b"}


def draw(result: Mapping[str, Any]) -> Figure:
    """KL and accuracy over the share of tokens that ran, with their intervals; dotted: the limits of what is safe.

    Methods that lack one of the sets are left out, and so is accuracy where full prefill answers nothing.
    """
    rows = [Row.from_json(row) for row in result["figures"]["rows"]]
    most = max(row.sets for row in rows)
    shown = [row for row in rows if row.set == rows[0].set and row.sets == most]
    shown = [row for row in shown if row.method not in (FULL, NO_PASSAGES)]
    right = any(row.relative is not None for row in shown)
    figure = Figure(figsize=(9, 9 if right else 5), layout="constrained", facecolor="white")
    axes = list(figure.subplots(1 + right, 1, squeeze=False, sharex=True)[:, 0])
    _points(axes[0], [(row, row.kl) for row in shown], MOST_KL)
    axes[0].set_yscale("log")
    axes[0].set_ylabel("KL from full prefill, nats a token")
    if right:
        _points(axes[1], [(row, row.relative) for row in shown], LEAST_RELATIVE)
        axes[1].set_ylabel("accuracy, of full prefill's")
    axes[-1].set_xscale("log")
    axes[-1].set_xlabel("tokens computed, share of the prompt; intervals 95 %, dotted: the limit")
    counts = sorted({row.questions for row in shown})
    asked = f"{counts[0]} questions" if len(counts) == 1 else f"{counts[0]} to {counts[-1]} questions a method"
    axes[0].set_title(f"{result['settings']['model']}, {rows[0].set}, {asked}", fontsize=11)
    return figure


def _points(ax: Axes, points: Sequence[tuple[Row, Interval | None]], limit: float) -> None:
    for row, found in points:
        if found is None:
            continue
        mean, low, high = found
        colour = COLOURS["prefix" if "recipe=prefix" in row.method else "isolated"]
        ends = [[max(0.0, mean - low)], [max(0.0, high - mean)]]
        ax.errorbar(row.computed_share, mean, yerr=ends, fmt="o", color=colour, markersize=4, elinewidth=0.6)
        name = row.method.replace(":recipe=prefix", " (prefix)")
        ax.annotate(f" {name}", (row.computed_share, mean), fontsize=6, color=colour)
    ax.axhline(limit, color="black", linewidth=0.8, linestyle=":")
    ax.grid(alpha=0.3)
    ax.tick_params(labelsize=8)


def main(arguments: Sequence[str] | None = None) -> None:
    draw_file("answers", __doc__, draw, 110, arguments)


if __name__ == "__main__":
    main()
