"""What eviction policies and the admission filter are worth: tables and plots from the simulator, no model.

python -m benchmarks.policies                 # some minutes on one core
python -m benchmarks.policies --requests 500 --blocks 1000 --million 10000    # seconds: only to see that it runs

Every stream of requests is replayed against every budget, policy and filter, beside Belady's rule, which knows the
future. Writes results/policies.json, policies.md, policies-hits.png and policies-ttft.png. Times to the first token
are estimates at stated rates (an 8B model on an A100; see `ragcache plan`), not measurements. One measurement is in it:
how long the simulator takes for a million reads.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.environment import environment
from benchmarks.options import add_numbers, add_places
from benchmarks.policies_page import page
from benchmarks.report import Goal, Result, show, write
from ragcache.store.eviction import ADMISSIONS, POLICIES
from ragcache_plan.accesses import Accesses, Workload, generated
from ragcache_plan.rates import MachineRates
from ragcache_plan.replay import Budgets, simulate

SHARES = (0.01, 0.05, 0.2)
BYTES_PER_TOKEN = 131072
MOST_SECONDS = 60.0
MILLION = 1_000_000


@dataclass(frozen=True)
class Settings:
    """requests, k, blocks: of every stream. million: reads, of as many blocks, whose replay is timed; 0: none"""

    requests: int = 10_000
    k: int = 5
    blocks: int = 20_000
    million: int = MILLION
    seed: int = 0


@dataclass(frozen=True)
class Stream:
    """changes:    to the plain workload (Zipf 0.8, equal lengths, no drift, no sessions)
    disk_share: budget of the disk tier as a share of the corpus, nothing on it at first; None: all blocks are there
    """

    name: str
    changes: dict[str, Any]
    disk_share: float | None = None

    def workload(self, settings: Settings) -> Workload:
        plain = Workload(settings.requests, settings.k, settings.blocks, seed=settings.seed)
        changes = dict(self.changes)
        if drift := changes.pop("drifts", 0):
            changes["drift"] = max(1, settings.requests // drift)
        return replace(plain, **changes)


# drifts: how often, over the whole stream, the hottest block becomes the coldest
STREAMS = (
    Stream("Zipf 0.6", {"zipf": 0.6}),
    Stream("Zipf 0.8", {}),
    Stream("Zipf 1.0", {"zipf": 1.0}),
    Stream("Zipf 1.2", {"zipf": 1.2}),
    Stream("drifting topics", {"zipf": 1.0, "drifts": 1000}),
    Stream("sessions", {"session": 8.0, "sticky": 0.6}),
    Stream("passages of 32 to 1,024 tokens", {"tokens": (32, 1024)}),
    Stream("all of it, small disk", {"zipf": 1.0, "drifts": 1000, "session": 8.0, "tokens": (32, 1024)}, 0.3),
)


@dataclass(frozen=True)
class Row:
    """One policy and filter on one stream under one budget; see ragcache_plan.replay.Outcome."""

    stream: str
    share: float
    policy: str
    admission: str
    memory: float
    disk: float
    computed: float
    optimum: float
    bound: float
    exact: bool
    read_bytes: int
    p50_s: float
    p95_s: float
    p99_s: float


def rows(settings: Settings, streams: Sequence[Stream] = STREAMS) -> Iterator[Row]:
    for stream in streams:
        trace = generated(stream.workload(settings))
        total = int(trace.num_bytes.sum())
        disk = None if stream.disk_share is None else int(total * stream.disk_share)
        budgets = {int(total * share): share for share in SHARES}
        wanted = [Budgets(memory, disk, eager=disk is None) for memory in budgets]
        for one in simulate(trace, wanted, list(POLICIES), list(ADMISSIONS)):
            yield Row(
                stream.name,
                budgets[one.memory_bytes],
                one.policy,
                one.admission,
                one.hit_rate["memory"],
                one.hit_rate["disk"],
                one.computed_rate,
                one.optimum_rate,
                one.bound_rate,
                one.optimum_exact,
                one.read_bytes["disk"],
                one.ttft_s["p50"],
                one.ttft_s["p95"],
                one.ttft_s["p99"],
            )
        print(f"\r{stream.name}: done".ljust(60), end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)


@dataclass(frozen=True)
class Speed:
    """Seconds, by the clock and of the processor, for so many reads of so many blocks: generated, replayed with `pgdsf`
    and `tinylfu`, compared with the optimum."""

    reads: int
    blocks: int
    wall_s: float
    cpu_s: float


def timed(reads: int, seed: int) -> Speed:
    wall, cpu = time.perf_counter(), time.process_time()
    trace = generated(Workload(reads // 5, 5, reads, seed=seed))
    list(simulate(trace, [_tenth(trace)], ["pgdsf"], ["tinylfu"]))
    return Speed(len(trace), len(trace.num_bytes), time.perf_counter() - wall, time.process_time() - cpu)


def _tenth(trace: Accesses) -> Budgets:
    return Budgets(int(trace.num_bytes.sum()) // 10)


def measure(settings: Settings) -> dict[str, Any]:
    figures: dict[str, Any] = {
        "rows": [asdict(row) for row in rows(settings)],
        "streams": {stream.name: asdict(stream.workload(settings)) for stream in STREAMS},
        "rates": asdict(MachineRates()),
    }
    return {**figures, "speed": asdict(timed(settings.million, settings.seed))} if settings.million else figures


def goals(figures: dict[str, Any], settings: Settings) -> list[Goal]:
    """On processor time: by the clock it depends on what else the machine does, and the page says both."""
    if "speed" not in figures:
        return []
    what = "processor seconds for a million reads of a million blocks, on one core"
    return [Goal(what, "at most", MOST_SECONDS, figures["speed"]["cpu_s"], settings.million == MILLION)]


def parse(arguments: Sequence[str]) -> tuple[Settings, Path]:
    parser = argparse.ArgumentParser("benchmarks.policies", description=__doc__)
    add_numbers(parser, Settings(), list(Settings.__dataclass_fields__))
    add_places(parser, None)
    given = parser.parse_args(arguments)
    return Settings(**{name: getattr(given, name) for name in Settings.__dataclass_fields__}), given.out


def main(arguments: Sequence[str] | None = None) -> Result:
    import benchmarks.policies_plot  # noqa: F401  # needs matplotlib: missing it shows before the work

    arguments = sys.argv[1:] if arguments is None else arguments
    settings, out = parse(arguments)
    hardware = environment("benchmarks.policies", arguments, torch.device("cpu"))
    figures = measure(settings)
    result = Result("policies", settings, hardware, {}, {}, figures, goals(figures, settings))
    write_all(result, out)
    show(replace(result, figures=figures.get("speed", {})), Console(width=140))
    return result


def write_all(result: Result, out: Path) -> None:
    """JSON, page and plots."""
    from benchmarks.policies_plot import plot_hits, plot_ttft

    path = write(result, out)
    found = result.to_json()
    (out / "policies.md").write_text("\n".join(page(found)) + "\n", encoding="utf-8")
    plot_hits(found, out / "policies-hits.png")
    plot_ttft(found, out / "policies-ttft.png")
    print(f"written to {path.parent}: policies.json, policies.md, policies-hits.png, policies-ttft.png")


if __name__ == "__main__":
    main()
