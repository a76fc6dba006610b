"""The memory of a soak's processes over time, as a PNG. Needs matplotlib, which the extra `bench` installs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

matplotlib.use("Agg")


def plot(result: Mapping[str, Any], path: Path) -> None:
    """result: what the soak wrote as JSON."""
    figure = Figure(figsize=(9, 4), layout="constrained")
    ax = figure.subplots()
    for process, points in result["figures"]["curve"].items():
        minutes = [point["at_s"] / 60 for point in points]
        (line,) = ax.plot(minutes, [point["rss_mib"] for point in points], label=f"{process}: RSS")
        ax.plot(
            minutes, [point["anonymous_mib"] for point in points], "--", color=line.get_color(), linewidth=0.9,
            label=f"{process}: of it anonymous",
        )  # fmt: skip
        if all("allocated_mib" in point for point in points):
            ax.plot(
                minutes, [point["allocated_mib"] for point in points], ":", color=line.get_color(), linewidth=0.9,
                label=f"{process}: allocated by malloc",
            )  # fmt: skip
    warmup = result["figures"]["limits"]["warmup_s"] / 60
    ax.axvspan(0, warmup, color="0.92", label="warming up: left out")
    ax.set_xlim(left=0)
    ax.set_ylim(bottom=0)
    ax.set_xlabel("minutes")
    ax.set_ylabel("MiB")
    figures = result["figures"]
    asked = f"{result['settings']['askers']} askers, {figures['questions']:,} questions"
    changed = f"{figures['added']:,} documents added, {figures['deleted']:,} deleted"
    ax.set_title(f"{asked}, {changed}", fontsize=10)
    ax.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, metadata={"Software": None})
