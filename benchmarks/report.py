"""Results: goals, JSON files, tables."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.environment import Environment, load_average
from benchmarks.timing import Ratio

RESULTS = Path(__file__).parent / "results"


# What a verdict takes. Loads are the machine's average over a minute: before, and after beyond the run's own threads.
LEAST_PAIRS = 10
MOST_LOAD, MOST_LOAD_AFTER = 0.5, 1.0
# The share of the processors' time that a host may give to other machines while samples are taken that cannot be
# taken again (`timing` takes the others again).
MOST_STOLEN = 0.1


@dataclass(frozen=True)
class Goal:
    """A measured number and the limit it is held against.

    kind:    "at most" or "at least"
    applies: the run had the sizes, shape and dtype that the goal is stated for
    pairs:   of timings, or rounds of them, behind `measured`; None: it does not depend on how fast the machine was
    low, high: 95 % interval of `measured`, where there is one
    """

    what: str
    kind: str
    limit: float
    measured: float
    applies: bool
    pairs: int | None = None
    low: float | None = None
    high: float | None = None

    @classmethod
    def of(cls, what: str, kind: str, limit: float, ratio: Ratio, applies: bool) -> Goal:
        return cls(what, kind, limit, ratio.median, applies, ratio.pairs, ratio.low, ratio.high)

    @classmethod
    def from_json(cls, found: Mapping[str, Any], ratios: Mapping[str, Any]) -> Goal:
        """A goal of a result's file. An older one names its pairs among the ratios alone."""
        fields = {name: found.get(name) for name in cls.__dataclass_fields__}
        fields["pairs"] = found.get("pairs", ratios.get(found["what"], {}).get("pairs"))
        return cls(**fields)  # type: ignore[arg-type]

    def holds(self, value: float) -> bool:
        """Whether a value is on the right side of the limit."""
        return value <= self.limit if self.kind == "at most" else value >= self.limit

    @property
    def within(self) -> bool:
        """Whether the measured number is. What it is worth says `verdict`."""
        return self.holds(self.measured)

    def verdict(self, hardware: Mapping[str, Any]) -> str:
        """ "met" or "missed", where the run can say so and the limit is outside of the interval.

        hardware: see `Result.hardware`
        """
        if not self.applies:
            return "other sizes than the goal's"
        if doubts := [*self._doubts_of_time(hardware), *_doubts_of_code(hardware)]:
            return f"to be measured again: {', '.join(doubts)}"
        if self.low is not None and self.high is not None and self.holds(self.low) != self.holds(self.high):
            return f"open: the limit is within {self.low:.4g} to {self.high:.4g}"
        return "met" if self.within else "missed"

    def _doubts_of_time(self, hardware: Mapping[str, Any]) -> Iterator[str]:
        if self.pairs is None:
            return
        if self.pairs < LEAST_PAIRS:
            yield f"{self.pairs} pair{'s' if self.pairs != 1 else ''}"
        before, after = hardware["load_1min"], hardware.get("load_after_1min")
        if before > MOST_LOAD:
            yield f"load {before:g} before"
        if after is None:
            yield "load after unknown"
        elif after > hardware["threads"] + MOST_LOAD_AFTER:
            yield f"load {after:g} after"
        if (stolen := hardware.get("stolen_share")) is not None and stolen > MOST_STOLEN:
            yield f"the host took {stolen:.0%} of the processors' time"


def _doubts_of_code(hardware: Mapping[str, Any]) -> Iterator[str]:
    """Older files name a dirty tree in the commit alone."""
    if not hardware.get("clean", not str(hardware["commit"]).endswith("-dirty")):
        yield "uncommitted changes"


@dataclass(frozen=True)
class Result:
    """What one benchmark writes.

    name:     names the file
    settings: what was asked for
    timings:  Timing by variant
    ratios:   Ratio by "a / b"
    figures:  everything else that was measured, JSON values
    load_after_1min: the machine's load average when the result was made, after the benchmark
    stolen_share: of all processors' time, what the hypervisor gave to other machines; None where samples that lost much
              were taken again
    """

    name: str
    settings: Any
    environment: Environment
    timings: Mapping[str, Any]
    ratios: Mapping[str, Any]
    figures: Mapping[str, Any]
    goals: Sequence[Goal]
    load_after_1min: float = field(default_factory=load_average)
    stolen_share: float | None = None

    @property
    def hardware(self) -> dict[str, Any]:
        """The environment, with what the run says of the machine."""
        about = {"load_after_1min": self.load_after_1min, "stolen_share": self.stolen_share}
        return {**_plain(self.environment), **about}

    def to_json(self) -> dict[str, Any]:
        hardware = self.hardware
        return {
            "name": self.name,
            "settings": _plain(self.settings),
            "hardware": hardware,
            "timings": _plain(self.timings),
            "ratios": _plain(self.ratios),
            "figures": _plain(self.figures),
            "goals": [{**asdict(goal), "verdict": goal.verdict(hardware)} for goal in self.goals],
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
        console.print(goals_table([result]))


def goals_table(results: Sequence[Result]) -> Table:
    table = Table(title="goals")
    for column in ("goal", "measured", "95 %", "pairs", ""):
        table.add_column(column)
    for result in results:
        for goal in result.goals:
            row = goal_row(goal, result.hardware)
            table.add_row(f"{goal.what}: {goal.kind} {goal.limit:g}", *row)
    return table


def goal_row(goal: Goal, hardware: Mapping[str, Any]) -> list[str]:
    """Measured, interval, pairs, verdict."""
    interval = "-" if goal.low is None or goal.high is None else f"{goal.low:.4g} to {goal.high:.4g}"
    pairs = "-" if goal.pairs is None else str(goal.pairs)
    return [f"{goal.measured:.4g}", interval, pairs, goal.verdict(hardware)]


GOALS_HEAD = ("| goal | limit | measured | 95 % | pairs | |", "|---|---|---|---|---|---|")


def goal_lines(found: Mapping[str, Any]) -> Iterator[str]:
    """A Markdown table of the goals in a result's file."""
    yield from GOALS_HEAD
    for goal in goals_of(found):
        yield goal_line(goal, found["hardware"])


def goals_of(found: Mapping[str, Any]) -> list[Goal]:
    """The goals in a result's file."""
    return [Goal.from_json(one, found["ratios"]) for one in found["goals"]]


def goal_line(goal: Goal, hardware: Mapping[str, Any]) -> str:
    return f"| {goal.what} | {goal.kind} {goal.limit:g} | {' | '.join(goal_row(goal, hardware))} |"


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
