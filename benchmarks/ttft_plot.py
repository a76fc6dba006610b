"""Picture of the time to first token for README: `python -m benchmarks.ttft_plot RESULT.json PICTURE.png`.

Reads what `python -m benchmarks.ttft` wrote. Needs matplotlib (extra `bench`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from benchmarks.plots import draw_file

OURS, THEIRS, FLOOR = "#1f6f8b", "#b0b0b0", "#c7843b"
BARS = {
    "transformers: full prefill": ("full prefill, transformers", THEIRS),
    "reposition: disk, cold page cache": ("reposition, KV on disk (cold cache)", OURS),
    "reposition: memory tier": ("reposition, KV in memory", OURS),
    "floor": ("floor: question over KV in place", FLOOR),
}


def medians(result: Mapping[str, Any]) -> dict[str, float]:
    """Median seconds to the first token, by the label of the bar."""
    return {label: float(result["timings"][name]["median_s"]) for name, (label, _) in BARS.items()}


def draw(result: Mapping[str, Any]) -> Figure:
    """Bars on a linear axis, on an opaque light background, so that light and dark pages show the same."""
    figure = Figure(figsize=(8, 2.5), layout="constrained", facecolor="white")
    ax = figure.subplots()
    values = medians(result)
    bars = ax.barh(list(values), list(values.values()), color=[colour for _, colour in BARS.values()])
    ax.bar_label(bars, [_seconds(value) for value in values.values()], padding=4, fontsize=10)
    ax.set_xlim(right=1.12 * max(values.values()))
    ax.invert_yaxis()
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.tick_params(axis="y", length=0)
    settings, hardware = result["settings"], result["hardware"]
    tokens = settings["passages"] * settings["tokens"]
    ax.set_title(f"Seconds to the first token, {tokens:,} tokens of passages", fontsize=11)
    machine = hardware["gpu"] or f"{hardware['cpu']}, {hardware['threads']} threads"
    what = f"{settings['shape']} shape, {settings['dtype']}, {machine}, {hardware['date'][:10]}"
    ax.set_xlabel(f"{what}, 1-minute load {hardware['load_1min']:g}", fontsize=8)
    return figure


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value >= 1 else f"{value:.2f} s"


def main(arguments: Sequence[str] | None = None) -> None:
    draw_file("ttft", __doc__, draw, 120, arguments)


if __name__ == "__main__":
    main()
