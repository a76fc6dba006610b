"""Picture of real models' answers for docs/results.md: `python -m benchmarks.answers_plot RESULT.json PICTURE.png`.

Reads what `python -m benchmarks.answers` wrote. Needs matplotlib (extra `bench`).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.answers_report import LEAST_RELATIVE, MOST_KL, Interval, Row
from ragcache_eval.methods import FULL
from ragcache_eval.runner import NO_PASSAGES

COLOURS = {"isolated": "#1f6f8b", "prefix": "#c7843b"}


def draw(result: Mapping[str, Any]) -> Figure:
    """KL and accuracy over the share of tokens that ran, with their intervals; dotted: the limits of what is safe."""
    rows = [Row.from_json(row) for row in result["figures"]["rows"]]
    shown = [row for row in rows if row.set == rows[0].set and row.method not in (FULL, NO_PASSAGES)]
    figure = Figure(figsize=(9, 9), layout="constrained", facecolor="white")
    above, below = figure.subplots(2, 1, sharex=True)
    _points(above, [(row, row.kl) for row in shown], MOST_KL)
    above.set_yscale("log")
    above.set_ylabel("KL from full prefill along its answer, nats a token")
    _points(below, [(row, row.relative) for row in shown], LEAST_RELATIVE)
    below.set_ylabel("accuracy, of full prefill's")
    below.set_xscale("log")
    below.set_xlabel("tokens computed, share of the prompt; intervals 95 %, dotted: the limit")
    counts = sorted({row.questions for row in shown})
    asked = f"{counts[0]} questions" if len(counts) == 1 else f"{counts[0]} to {counts[-1]} questions a method"
    above.set_title(f"{result['settings']['model']}, {rows[0].set}, {asked}", fontsize=11)
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
    parser = argparse.ArgumentParser("benchmarks.answers_plot", description=__doc__)
    parser.add_argument("result", type=Path, help="what benchmarks.answers wrote")
    parser.add_argument("picture", type=Path, help="PNG to write")
    given = parser.parse_args(arguments)
    result = json.loads(given.result.read_text(encoding="utf-8"))
    draw(result).savefig(given.picture, dpi=110, metadata={"Software": None})


if __name__ == "__main__":
    main()
