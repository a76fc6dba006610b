"""Results: goals, JSON files, tables."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path
from typing import Any

from benchmarks.environment import Environment, load_average
from benchmarks.timing import Ratio

RESULTS = Path(__file__).resolve().parent / "results"


# Conditions of a verdict. Loads are averages over a minute: before the run, and after it beyond the run's own threads.
LEAST_PAIRS = 10
MOST_LOAD, MOST_LOAD_AFTER = 0.5, 1.0
# Largest share of the processors' time that the host may give to other machines, for samples that are not repeated
# (`timing` repeats its samples).
MOST_STOLEN = 0.1


@dataclass(frozen=True)
class Goal:
    """A measured number, and the limit that it is compared with.

    kind:    "at most" or "at least"
    applies: whether the run had the sizes, shape and dtype of the goal
    pairs:   number of timings, or rounds, that give `measured`; None: it does not depend on the machine's speed
    low, high: 95 % interval of `measured`, if known
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
    def from_json(cls, found: Mapping[str, Any]) -> Goal:
        """Read a goal of a result's file."""
        return cls(**{name: found.get(name) for name in cls.__dataclass_fields__})  # type: ignore[arg-type]

    def holds(self, value: float) -> bool:
        """Return whether a value is on the right side of the limit."""
        return value <= self.limit if self.kind == "at most" else value >= self.limit

    def verdict(self, hardware: Mapping[str, Any]) -> str:
        """Return "met" or "missed", if the run can decide and the limit is outside the interval.

        hardware: see `Result.hardware`
        """
        if not self.applies:
            return "other sizes than the goal's"
        if doubts := list(self._doubts(hardware)):
            return f"to be measured again: {', '.join(doubts)}"
        if self.low is not None and self.high is not None and self.holds(self.low) != self.holds(self.high):
            return f"open: the limit is within {self.low:.4g} to {self.high:.4g}"
        return "met" if self.holds(self.measured) else "missed"

    def _doubts(self, hardware: Mapping[str, Any]) -> Iterator[str]:
        if self.pairs is not None:
            yield from self._doubts_of_time(self.pairs, hardware)
        if not hardware["clean"]:
            yield "uncommitted changes"

    def _doubts_of_time(self, pairs: int, hardware: Mapping[str, Any]) -> Iterator[str]:
        if pairs < LEAST_PAIRS:
            yield f"{pairs} pair{'s' if pairs != 1 else ''}"
        before, after = hardware["load_1min"], hardware["load_after_1min"]
        if before > MOST_LOAD:
            yield f"load {before:g} before"
        if after > hardware["threads"] + MOST_LOAD_AFTER:
            yield f"load {after:g} after"
        if (stolen := hardware["stolen_share"]) is not None and stolen > MOST_STOLEN:
            yield f"the host took {stolen:.0%} of the processors' time"


@dataclass(frozen=True)
class Result:
    """The result of a benchmark.

    name:     names the file
    settings: of the run
    timings:  Timing by variant
    ratios:   Ratio by "a / b"
    figures:  everything else that was measured, JSON values
    load_after_1min: the machine's load average when the result was made, after the benchmark
    stolen_share: share of all processors' time that the hypervisor gave to other machines; None if samples that lost
              much time were repeated
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
        """Return the environment, with the run's own measurements of the machine."""
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


GOALS_HEAD = ("| goal | limit | measured | 95 % | pairs | |", "|---|---|---|---|---|---|")


def goal_lines(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield a Markdown table of the goals in a result's file."""
    yield from GOALS_HEAD
    for goal in goals_of(found):
        yield goal_line(goal, found["hardware"])


def goals_of(found: Mapping[str, Any]) -> list[Goal]:
    """Return the goals in a result's file."""
    return [Goal.from_json(one) for one in found["goals"]]


def goal_line(goal: Goal, hardware: Mapping[str, Any]) -> str:
    """Return a goal's row of the table: limit, measured, interval, pairs, verdict."""
    interval = "-" if goal.low is None or goal.high is None else f"{goal.low:.4g} to {goal.high:.4g}"
    pairs = "-" if goal.pairs is None else str(goal.pairs)
    limit = f"{goal.kind} {goal.limit:g}"
    return f"| {goal.what} | {limit} | {goal.measured:.4g} | {interval} | {pairs} | {goal.verdict(hardware)} |"


def page(found: Mapping[str, Any]) -> list[str]:
    """Return a Markdown page of a result's file: times, ratios, figures, goals, and where they were measured."""
    lines = [f"# {found['name']}", "", where_line(found), ""]
    if found["timings"]:
        lines += ["| | median, ms | min | max | runs |", "|---|---|---|---|---|"]
        for name, own in found["timings"].items():
            times = " | ".join(f"{1000 * own[key]:.2f}" for key in ("median_s", "min_s", "max_s"))
            lines.append(f"| {name} | {times} | {own['runs']} |")
        lines.append("")
    if found["ratios"]:
        lines += ["| ratio | median | 95 % | pairs |", "|---|---|---|---|"]
        for name, own in found["ratios"].items():
            lines.append(f"| {name} | {own['median']:.4f} | {own['low']:.4f} to {own['high']:.4f} | {own['pairs']} |")
        lines.append("")
    if found["figures"]:
        lines += ["| figure | value |", "|---|---|"]
        for name, value in found["figures"].items():
            lines.append(f"| {name} | {f'{value:.6g}' if isinstance(value, float) else value} |")
        lines.append("")
    return [*lines, *goal_lines(found)] if found["goals"] else lines[:-1]


def where_line(found: Mapping[str, Any]) -> str:
    """Return a sentence with a result's command, machine and date."""
    hardware = found["hardware"]
    machine = hardware["gpu"] or f"{hardware['cpu']}, {hardware['threads']} threads"
    return f"`{hardware['command']}`, {machine}, torch {hardware['torch']}, {hardware['date'][:10]}."


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return _plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Path):
        return value.name if value.is_absolute() else str(value)
    return value
