"""One picture of one run of all benchmarks, and what modules that draw one result share."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

OURS, THEIRS = "#1f6f8b", "#b0b0b0"


def plot(results: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw the timings of each result (as `Result.to_json` gives them) and write a PNG."""
    heights = [max(2.0, 0.32 * len(result["timings"]) + 1) for result in results]
    figure = Figure(figsize=(10, sum(heights)), layout="constrained")
    axes = figure.subplots(len(results), 1, squeeze=False, gridspec_kw={"height_ratios": heights})
    for ax, result in zip(axes[:, 0], results, strict=True):
        _bars(ax, result)
    hardware = results[0]["hardware"]
    figure.suptitle(f"{hardware['gpu'] or hardware['cpu']}, {hardware['threads']} threads, torch {hardware['torch']}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, metadata={"Software": None})


def draw_file(
    benchmark: str,
    about: str | None,
    draw: Callable[[Mapping[str, Any]], Figure],
    dpi: int,
    arguments: Sequence[str] | None,
) -> None:
    """The command line of a module that draws one picture out of a benchmark's result. about: its help"""
    parser = argparse.ArgumentParser(f"benchmarks.{benchmark}_plot", description=about)
    parser.add_argument("result", type=Path, help=f"what benchmarks.{benchmark} wrote")
    parser.add_argument("picture", type=Path, help="PNG to write")
    given = parser.parse_args(arguments)
    result = json.loads(given.result.read_text(encoding="utf-8"))
    draw(result).savefig(given.picture, dpi=dpi, metadata={"Software": None})


def _bars(ax: Axes, result: Mapping[str, Any]) -> None:
    """Median times on a logarithmic axis; thin lines reach from the fastest run to the slowest."""
    timings = result["timings"]
    medians = [1000 * timing["median_s"] for timing in timings.values()]
    below = [1000 * (t["median_s"] - t["min_s"]) for t in timings.values()]
    above = [1000 * (t["max_s"] - t["median_s"]) for t in timings.values()]
    colours = [THEIRS if name.startswith("transformers") else OURS for name in timings]
    bars = ax.barh(list(timings), medians, color=colours, xerr=[below, above], error_kw={"elinewidth": 0.8})
    ax.bar_label(bars, [f"  {median:.3g} ms" for median in medians], fontsize=8)
    ax.set_xscale("log")
    ax.set_xlim(right=4 * max(medians))
    ax.invert_yaxis()
    ax.set_title(result["name"], fontsize=10)
    ax.set_xlabel("milliseconds, logarithmic", fontsize=8)
    ax.tick_params(labelsize=8)
