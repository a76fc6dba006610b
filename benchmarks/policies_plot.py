"""Hit rates and times to first token of the simulated policies, as PNGs. Needs matplotlib (extra `bench`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

COLOURS = {"lru": "#7a7a7a", "lfu": "#c7843b", "gdsf": "#3b8f5c", "pgdsf": "#1f6f8b"}
LINES = {"all": "-", "tinylfu": "--"}
COLUMNS = 4
Rows = Sequence[Mapping[str, Any]]


def plot_hits(result: Mapping[str, Any], path: Path) -> None:
    """Share of the reads that memory serves, over its budget; the dotted line is Belady's rule, or the bound."""
    figure, axes = _grid(result)
    for ax, (stream, rows) in zip(axes, _by_stream(result).items(), strict=False):
        _lines(ax, rows, "memory", 100)
        own = _series(rows, rows[0]["policy"], rows[0]["admission"])
        limit = [100 * row["optimum" if row["exact"] else "bound"] for row in own]
        ax.plot([100 * row["share"] for row in own], limit, ":", color="black", label="optimum, or what none exceeds")
        _finish(ax, stream, "% of reads from memory")
        ax.set_ylim(0, 100)
    _save(figure, axes[0], path)


def plot_ttft(result: Mapping[str, Any], path: Path) -> None:
    """Estimated p95 of the time to the first token, over the memory budget."""
    figure, axes = _grid(result)
    for ax, (stream, rows) in zip(axes, _by_stream(result).items(), strict=False):
        _lines(ax, rows, "p95_s", 1000)
        _finish(ax, stream, "first token, p95, ms")
        ax.set_ylim(bottom=0)
    _save(figure, axes[0], path)


def _grid(result: Mapping[str, Any]) -> tuple[Figure, list[Axes]]:
    count = len(_by_stream(result))
    lines = -(-count // COLUMNS)
    figure = Figure(figsize=(3.4 * COLUMNS, 2.9 * lines + 0.6), layout="constrained")
    axes = list(figure.subplots(lines, COLUMNS, squeeze=False).flat)
    for ax in axes[count:]:
        ax.set_axis_off()
    return figure, axes


def _by_stream(result: Mapping[str, Any]) -> dict[str, list[Mapping[str, Any]]]:
    found: dict[str, list[Mapping[str, Any]]] = {}
    for row in result["figures"]["rows"]:
        found.setdefault(row["stream"], []).append(row)
    return found


def _series(rows: Rows, policy: str, admission: str) -> list[Mapping[str, Any]]:
    own = [row for row in rows if (row["policy"], row["admission"]) == (policy, admission)]
    return sorted(own, key=lambda row: float(row["share"]))


def _lines(ax: Axes, rows: Rows, figure: str, factor: float) -> None:
    for policy, admission in dict.fromkeys((row["policy"], row["admission"]) for row in rows):
        own = _series(rows, policy, admission)
        ax.plot(
            [100 * row["share"] for row in own],
            [factor * row[figure] for row in own],
            LINES.get(admission, "-."),
            marker="o",
            markersize=3,
            linewidth=1.2,
            color=COLOURS.get(policy),
            label=f"{policy}, {admission}",
        )


def _finish(ax: Axes, stream: str, what: str) -> None:
    ax.set_xscale("log")
    ticks = sorted({float(tick) for line in ax.get_lines() for tick in line.get_xdata()})
    ax.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    ax.minorticks_off()
    ax.set_title(stream, fontsize=9)
    ax.set_xlabel("memory, % of all KV", fontsize=8)
    ax.set_ylabel(what, fontsize=8)
    ax.tick_params(labelsize=7)


def _save(figure: Figure, first: Axes, path: Path) -> None:
    handles, labels = first.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, metadata={"Software": None})
