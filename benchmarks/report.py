"""Results: goals, JSON files, tables."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.environment import Environment

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Goal:
    """A measured number and the limit it is held against.

    kind:    "at most" or "at least"
    applies: the run had the sizes, shape and dtype that the goal is stated for
    """

    what: str
    kind: str
    limit: float
    measured: float
    applies: bool

    @property
    def met(self) -> bool:
        return self.measured <= self.limit if self.kind == "at most" else self.measured >= self.limit


@dataclass(frozen=True)
class Result:
    """What one benchmark writes.

    name:     names the file
    settings: what was asked for
    timings:  Timing by variant
    ratios:   Ratio by "a / b"
    figures:  everything else that was measured, JSON values
    """

    name: str
    settings: Any
    environment: Environment
    timings: Mapping[str, Any]
    ratios: Mapping[str, Any]
    figures: Mapping[str, Any]
    goals: Sequence[Goal]

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "settings": _plain(self.settings),
            "hardware": _plain(self.environment),
            "timings": _plain(self.timings),
            "ratios": _plain(self.ratios),
            "figures": _plain(self.figures),
            "goals": [{**asdict(goal), "met": goal.met} for goal in self.goals],
        }


def write(result: Result, directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{result.name}.json"
    path.write_text(json.dumps(result.to_json(), indent=2) + "\n")
    return path


def show(result: Result, console: Console | None = None) -> None:
    console = console or Console(width=140)
    if result.timings:
        console.print(_timings_table(result))
    if result.figures:
        console.print(_figures_table(result))
    if result.goals:
        console.print(goals_table(result.goals))


def goals_table(goals: Sequence[Goal]) -> Table:
    table = Table(title="goals")
    for column in ("goal", "measured", ""):
        table.add_column(column)
    for goal in goals:
        verdict = ("met" if goal.met else "MISSED") if goal.applies else "other sizes than the goal's"
        table.add_row(f"{goal.what}: {goal.kind} {goal.limit:g}", f"{goal.measured:.4g}", verdict)
    return table


def _timings_table(result: Result) -> Table:
    table = Table(title=result.name)
    for column in ("variant", "median ms", "min", "max", "runs"):
        table.add_column(column, justify="left" if column == "variant" else "right")
    for name, timing in result.timings.items():
        times = (f"{1000 * s:.2f}" for s in (timing.median_s, timing.min_s, timing.max_s))
        table.add_row(name, *times, str(timing.runs))
    for name, ratio in result.ratios.items():
        table.add_row(name, f"x {ratio.median:.4f}", f"{ratio.min:.4f}", f"{ratio.max:.4f}", str(ratio.pairs))
    return table


def _figures_table(result: Result) -> Table:
    table = Table(title=f"{result.name}: figures")
    table.add_column("figure")
    table.add_column("value", justify="right")
    for name, value in result.figures.items():
        table.add_row(name, f"{value:.6g}" if isinstance(value, float) else str(value))
    return table


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return _plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value
