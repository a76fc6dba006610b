"""What a soak run has to show, worked out from its records: every check can fail, and says what it measured.

A run writes a line for each question (`Asked`) and for each deletion (`Deleted`), and takes a sample of its processes
every few seconds (`Sample`). Nothing here asks, sleeps or looks at a clock.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from benchmarks.report import Goal

MIB = 1 << 20
ANSWERED, CANCELLED, FAILED = "answered", "cancelled", "failed"
STAYING, PASSING, OPEN = "staying", "passing", "open"
T = TypeVar("T")


@dataclass(frozen=True)
class Asked:
    """A question and its outcome.

    via:      "server" (the OpenAI client) or "engine" (RagCache itself)
    kind:     "staying": over the documents that stay; "passing": over one that comes and goes; "open": over all
    number:   of the question among those of its kind
    outcome:  "answered", "cancelled" (given up after its first piece) or "failed"; `error` says how
    sent_at:  seconds on the run's clock, before the question was sent
    sources:  ids of the documents of the passages used for the answer, best first
    ttft_s:   as the engine measured it; None if there was no first token
    """

    asker: int
    via: str
    kind: str
    number: int
    method: str
    streamed: bool
    outcome: str
    sent_at: float
    took_s: float
    ttft_s: float | None
    text: str
    sources: tuple[str, ...]
    error: str = ""


@dataclass(frozen=True)
class Deleted:
    """A document whose deletion had returned at `at`, on the run's clock."""

    id: str
    at: float


class Expected(NamedTuple):
    """A fresh engine's answer, when asked alone.

    sources: as in `Asked`; for a passing document only their number counts, since its id is different each time it
    comes
    """

    text: str
    sources: tuple[str, ...]


Answers = Mapping[tuple[str, int, str], Expected]


@dataclass(frozen=True)
class Sample:
    """A process at a moment.

    at_s:  on the run's clock; cpu_s: processor time so far
    allocated_bytes: by malloc, and not freed; None if unknown, for example for another process
    """

    process: str
    at_s: float
    rss_bytes: int
    anonymous_bytes: int
    descriptors: int
    threads: int
    cpu_s: float
    tier_bytes: int
    allocated_bytes: int | None = None


@dataclass(frozen=True)
class Ending:
    """The store after the run, when all passing documents had been deleted.

    unreferenced: blocks on disk that no document refers to, before anything was repaired
    repairs:      repairs that `doctor` then found necessary
    damaged:      blocks that were found damaged while it ran
    evictions:    of the engine's memory tier
    exit_status:  of the server, after the request to stop
    logged:       errors in the server's log
    """

    unreferenced: int
    repairs: int
    damaged: int
    evictions: int
    exit_status: int
    logged: int


@dataclass(frozen=True)
class Limits:
    """Limits of the checks.

    growth_share, growth_bytes: how much a process may grow, as a share of its size after warming up and in bytes; the
    larger counts
    warmup_s:         samples before are left out
    spare:            descriptors and threads by which the last quarter's median may exceed the first quarter's
    least_flat_s:     a run whose measured part is shorter shows nothing about growth, and the goals do not apply
    """

    growth_share: float = 0.05
    growth_bytes: int = 50 * MIB
    warmup_s: float = 300.0
    spare: int = 4
    least_flat_s: float = 1500.0

    def growth(self, before: float) -> float:
        return max(self.growth_share * before, self.growth_bytes)


def write_line(file: Any, record: Asked | Deleted) -> None:
    file.write(json.dumps(asdict(record)) + "\n")
    file.flush()


def read_lines(path: Path, kind: Callable[..., T]) -> Iterator[T]:
    """Yield the records of a file of such lines."""
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            fields = json.loads(line)
            yield kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()})


class Counts(NamedTuple):
    """compared: answers that were compared with the expected answer. unlike, stale, failed: the first few, in words."""

    asked: int
    answered: int
    cancelled: int
    compared: int
    unlike: list[str]
    stale: list[str]
    failed: list[str]


def count(asked: Iterable[Asked], deleted: Iterable[Deleted], expected: Answers) -> Counts:
    """Compare every record with the known answers. Lists are whole: their lengths are the numbers."""
    gone = {one.id: one.at for one in deleted}
    total, outcomes, compared = 0, {ANSWERED: 0, CANCELLED: 0, FAILED: 0}, 0
    unlike: list[str] = []
    stale: list[str] = []
    failed: list[str] = []
    for one in asked:
        total += 1
        outcomes[one.outcome] += 1
        where = f"{one.via}, {one.kind} {one.number}, {one.method}, sent at {one.sent_at:.2f} s"
        stale += [f"{where}: {id} was deleted at {gone[id]:.2f} s" for id in one.sources if is_stale(id, one, gone)]
        if one.outcome == FAILED:
            failed.append(f"{where}: {one.error}")
            continue
        wanted = known_answer(one, expected)
        if wanted is not None:
            compared += 1
            if not agrees(one, wanted):
                unlike.append(f"{where}: {one.text!r} from {one.sources}, expected {wanted.text!r}")
    return Counts(total, outcomes[ANSWERED], outcomes[CANCELLED], compared, unlike, stale, failed)


def is_stale(id: str, asked: Asked, gone: Mapping[str, float]) -> bool:
    """Return whether the document was deleted before the question was sent (law 10)."""
    return id in gone and gone[id] < asked.sent_at


def known_answer(asked: Asked, expected: Answers) -> Expected | None:
    """Return the expected answer, or None if it depends on the passing documents that were there.

    That is so for open questions, and for a document that was already deleted.
    """
    wanted = expected.get((asked.kind, asked.number, asked.method))
    if wanted is None or (asked.kind == PASSING and len(asked.sources) != len(wanted.sources)):
        return None
    return wanted


def agrees(asked: Asked, wanted: Expected) -> bool:
    """Return whether an answer is as expected. A cancelled answer is the beginning of the whole answer."""
    if asked.kind == STAYING and asked.sources != wanted.sources:
        return False
    return wanted.text.startswith(asked.text) if asked.outcome == CANCELLED else asked.text == wanted.text


class Growth(NamedTuple):
    """Growth of a figure of a process, warm-up left out.

    before, after: medians of the first and of the last quarter
    drift:         slope by least squares over the second half, times its length
    """

    before: float
    after: float
    drift: float

    @property
    def rise(self) -> float:
        return self.after - self.before


def growth(samples: Sequence[Sample], figure: str, warmup_s: float) -> Growth | None:
    """Return the growth.

    samples: of a process, in order. None for fewer than eight after the warm-up that have the figure.
    """
    kept = [one for one in samples if one.at_s >= warmup_s and getattr(one, figure) is not None]
    if len(kept) < 8:
        return None
    values = [float(getattr(one, figure)) for one in kept]
    quarter, half = len(kept) // 4, len(kept) // 2
    times = [one.at_s for one in kept[half:]]
    slope = statistics.linear_regression(times, values[half:]).slope
    before, after = statistics.median(values[:quarter]), statistics.median(values[-quarter:])
    return Growth(before, after, slope * (times[-1] - times[0]))


def goals(
    counts: Counts, changes: Sequence[str], samples: Sequence[Sample], ending: Ending, limits: Limits, budget_bytes: int
) -> list[Goal]:
    """Return the goals.

    changes: changes of the documents that failed, in words. budget_bytes: of each process's memory tier.
    """
    none = {
        "questions that ended in an error": len(counts.failed),
        "answers unlike the expected one": len(counts.unlike),
        "sources that were deleted before the question was sent": len(counts.stale),
        "changes of documents that failed": len(changes),
        "blocks left on disk that no document refers to": ending.unreferenced,
        "repairs by doctor": ending.repairs,
        "damaged blocks": ending.damaged,
        "exit status of the server": abs(ending.exit_status),
        "errors in the server's log": ending.logged,
        "bytes of the memory tier over its budget": max(
            [0, *(sample.tier_bytes - budget_bytes for sample in samples)]
        ),
    }  # fmt: skip
    some = {
        "answers compared with the expected one": counts.compared,
        "cancelled questions": counts.cancelled,
        "evictions": ending.evictions,
    }
    return [
        *(Goal(what, "at most", 0, number, applies=True) for what, number in none.items()),
        *(Goal(what, "at least", 1, number, applies=True) for what, number in some.items()),
        *(goal for process in processes(samples) for goal in flat(process, of(samples, process), limits)),
    ]


def flat(process: str, samples: Sequence[Sample], limits: Limits) -> list[Goal]:
    """Return goals that memory, descriptors and threads of a process do not grow."""
    found = {name: growth(samples, name, limits.warmup_s) for name in ("rss_bytes", "descriptors", "threads")}
    memory, descriptors, threads = found.values()
    if memory is None or descriptors is None or threads is None:
        return []
    applies = samples[-1].at_s - limits.warmup_s >= limits.least_flat_s
    most = limits.growth(memory.before) / MIB
    rows = [
        ("RSS, last quarter less first, MiB", most, memory.rise / MIB),
        ("RSS, trend over the second half, MiB", most, memory.drift / MIB),
        ("file descriptors, last quarter less first", limits.spare, descriptors.rise),
        ("threads, last quarter less first", limits.spare, threads.rise),
    ]
    if (allocated := growth(samples, "allocated_bytes", limits.warmup_s)) is not None:
        rows.append(("allocated by malloc, last quarter less first, MiB", most, allocated.rise / MIB))
    return [Goal(f"{process}: {what}", "at most", limit, measured, applies) for what, limit, measured in rows]


def processes(samples: Iterable[Sample]) -> list[str]:
    return list(dict.fromkeys(sample.process for sample in samples))


def of(samples: Iterable[Sample], process: str) -> list[Sample]:
    return [sample for sample in samples if sample.process == process]
