"""Pictures of results: `python -m benchmarks.plots RESULT.json PICTURE.png`. Needs matplotlib (extra `bench`)."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.answers_report import LEAST_RELATIVE, MOST_KL, Interval, Row
from ragcache.errors import ConfigError
from ragcache_eval.methods import FULL
from ragcache_eval.runner import NO_PASSAGES

Found = Mapping[str, Any]
OURS, THEIRS, FLOOR = "#1f6f8b", "#b0b0b0", "#c7843b"
FIRST_TOKENS = {
    "transformers: full prefill": ("full prefill, transformers", THEIRS),
    "reposition: disk, cold page cache": ("reposition, KV on disk (cold cache)", OURS),
    "reposition: memory tier": ("reposition, KV in memory", OURS),
    "floor": ("floor: question over KV in place", FLOOR),
}


def save(figure: Figure, path: Path) -> None:
    """Write a PNG without metadata of the machine that drew it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, metadata={"Software": None})


def draw_ttft(found: Found) -> Figure:
    """Draw the time to first token as bars on a linear axis, on an opaque light background."""
    figure = Figure(figsize=(8, 2.5), layout="constrained", facecolor="white")
    ax = figure.subplots()
    values = {label: float(found["timings"][name]["median_s"]) for name, (label, _) in FIRST_TOKENS.items()}
    bars = ax.barh(list(values), list(values.values()), color=[colour for _, colour in FIRST_TOKENS.values()])
    labels = [f"{value:.1f} s" if value >= 1 else f"{value:.2f} s" for value in values.values()]
    ax.bar_label(bars, labels, padding=4, fontsize=10)
    ax.set_xlim(right=1.12 * max(values.values()))
    ax.invert_yaxis()
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.tick_params(axis="y", length=0)
    settings, hardware = found["settings"], found["hardware"]
    tokens = settings["passages"] * settings["tokens"]
    ax.set_title(f"Seconds to the first token, {tokens:,} tokens of passages", fontsize=11)
    machine = hardware["gpu"] or f"{hardware['cpu']}, {hardware['threads']} threads"
    what = f"{settings['shape']} shape, {settings['dtype']}, {machine}, {hardware['date'][:10]}"
    ax.set_xlabel(f"{what}, 1-minute load {hardware['load_1min']:g}", fontsize=8)
    return figure


def draw_answers(found: Found) -> Figure:
    """Draw KL and accuracy over the share of tokens that ran, with their intervals.

    Dotted lines are the limits of a safe method. Methods that lack any set are left out, and so is accuracy
    if full prefill answers nothing.
    """
    rows = [Row.from_json(row) for row in found["figures"]["rows"]]
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
    counts = sorted({row.questions for row in shown}) or [0]
    asked = f"{counts[0]} questions" if len(counts) == 1 else f"{counts[0]} to {counts[-1]} questions a method"
    axes[0].set_title(f"{found['settings']['model']}, {rows[0].set}, {asked}", fontsize=11)
    return figure


def _points(ax: Axes, points: Sequence[tuple[Row, Interval | None]], limit: float) -> None:
    for row, found in points:
        if found is None:
            continue
        mean, low, high = found
        colour = FLOOR if "recipe=prefix" in row.method else OURS
        ends = [[max(0.0, mean - low)], [max(0.0, high - mean)]]
        ax.errorbar(row.computed_share, mean, yerr=ends, fmt="o", color=colour, markersize=4, elinewidth=0.6)
        name = row.method.replace(":recipe=prefix", " (prefix)")
        ax.annotate(f" {name}", (row.computed_share, mean), fontsize=6, color=colour)
    ax.axhline(limit, color="black", linewidth=0.8, linestyle=":")
    ax.grid(alpha=0.3)
    ax.tick_params(labelsize=8)


def draw_week(found: Found) -> Figure:
    """Draw the share of passage tokens that each cache finds, by its room, and the share computed over the week."""
    figure = Figure(figsize=(9, 3.6), layout="constrained", facecolor="white")
    left, right = figure.subplots(1, 2)
    rooms = found["figures"]["rooms"]
    at = [row["room"] / 1000 for row in rooms]
    left.fill_between(at, *([100 * row["optimum"][end] for row in rooms] for end in (0, 1)), color="0.85")
    left.annotate("optimum", (at[0], 100 * rooms[0]["optimum"][1] + 8), fontsize=8)
    for colour, policy in zip((OURS, FLOOR), rooms[0]["policies"], strict=False):
        values = [100 * row["policies"][policy]["found"]["passage"] for row in rooms]
        left.plot(at, values, "o-", color=colour, markersize=4, label=f"passages, {policy}")
    values = [100 * row["prefix cache"]["found"]["passage"] for row in rooms]
    left.plot(at, values, "o-", color=THEIRS, markersize=4, label="prefix cache")
    left.set_xlabel("room, thousand tokens", fontsize=9)
    left.set_title("Passage tokens found, %", fontsize=10)
    row = rooms[-1]
    first = next(iter(row["policies"]))
    ours = (OURS, f"passages, {first}", row["policies"][first])
    for colour, label, one in (ours, (THEIRS, "prefix cache", row["prefix cache"])):
        periods = one["periods"]
        days = [period["hours"] / 24 for period in periods]
        right.plot(days, [100 * period["computed"] for period in periods], color=colour, label=label)
    right.set_xlabel(f"days; room for {row['room']:,} tokens", fontsize=9)
    right.set_title("Prompt tokens computed, %, by six hours", fontsize=10)
    for ax in (left, right):
        ax.set_ylim(0, 100)
        ax.spines[["top", "right"]].set_visible(False)
        ax.legend(fontsize=8, loc="lower right" if ax is left else "upper right")
    return figure


DRAWN: dict[str, Callable[[Found], Figure]] = {
    "answers": draw_answers,
    "ttft": draw_ttft,
    "week": draw_week,
}


def main(arguments: Sequence[str]) -> None:
    """Draw a result. Raises ConfigError if there is no picture for its benchmark."""
    result, picture = map(Path, arguments)
    found = json.loads(result.read_text(encoding="utf-8"))
    benchmark = re.search(r"benchmarks[. ](\w+)", found["hardware"]["command"])
    if benchmark is None or (draw := DRAWN.get(benchmark[1])) is None:
        raise ConfigError(f"{result}: there is no picture of it; there are of {', '.join(DRAWN)}")
    save(draw(found), picture)


if __name__ == "__main__":
    main(sys.argv[1:])
