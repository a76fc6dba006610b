"""An hour, or as long as you like, of many askers while documents come and go: are answers right, is memory flat?

scripts/soak                                  # an hour of 8 askers
scripts/soak --minutes 3 --codec int8

Two processes share one store: `ragcache serve`, which half of the askers ask through OpenAI's client, and this one,
whose engine the other half asks. Beside them two threads add and delete documents, one through each. Expected answers
come from a fresh engine over another store, asked one by one beforehand. The memory tiers are too small for the
documents, so that blocks are evicted all the time. The checks: benchmarks/soak_checks.py. Exit status 1 when a
check fails.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

import ragcache as rc
from benchmarks import soak_checks, soak_load
from benchmarks.files import file_system
from benchmarks.malloc import allocated_bytes
from benchmarks.report import Result, goal_lines, where_line
from benchmarks.runner import Run as Surroundings
from ragcache.engine.doctor import DoctorReport
from ragcache.errors import ConfigError

ROOT = Path(__file__).parents[1]
METHODS = ("link", "reposition", "full", "a3", "cacheblend", "samkv")
SERVER_START_S = 180
SERVER_STOP_S = 300
CURVE_POINTS = 120
SHOWN = 20


@dataclass(frozen=True)
class Settings:
    """minutes:      of asking; what comes before and after is not in it
    askers:       half of them ask through the server
    think_s:      mean wait of an asker between two questions; change_s: of each thread that changes documents
    memory, prefix_memory: budgets of each process's memory tier and prefix tree, bytes
    staying, passing, questions: documents of both kinds; questions over the staying ones
    sample_s:     between two looks at the processes
    keep:         a directory where stores, journals and the server's log stay; else they are removed
    warmup_s:     of the measured minutes, not counted where growth is looked for; None: a quarter, at most 15 minutes
    """

    minutes: float = 60.0
    askers: int = 8
    think_s: float = 3.0
    change_s: float = 4.0
    memory: int = 4 * soak_checks.MIB
    prefix_memory: int = 8 * soak_checks.MIB
    codec: str = "int8"
    eviction: str = "lru"
    admission: str = "all"
    methods: tuple[str, ...] = METHODS
    staying: int = 160
    passing: int = 48
    questions: int = 60
    sample_s: float = 10.0
    warmup_s: float | None = None
    threads: int = 1
    seed: int = 0
    keep: Path | None = None

    def __post_init__(self) -> None:
        """Raise ConfigError for a soak that could show nothing."""
        if self.minutes <= 0 or self.askers < 2 or self.passing < 4 or self.staying < self.passing:
            raise ConfigError("a soak takes time, 2 askers, 4 passing documents and at least as many that stay")

    @property
    def limits(self) -> soak_checks.Limits:
        return soak_checks.Limits(warmup_s=min(900.0, 15.0 * self.minutes) if self.warmup_s is None else self.warmup_s)

    def corpus(self) -> soak_load.Corpus:
        return soak_load.draw_corpus(self.staying, self.passing, self.questions, self.seed)

    def store(self, memory: int, prefix_memory: int) -> rc.StoreConfig:
        return rc.StoreConfig(
            memory_bytes=memory,
            codec=self.codec,
            eviction=self.eviction,
            admission=self.admission,
            prefix_bytes=prefix_memory,
        )


def expected_answers(settings: Settings, directory: Path) -> dict[tuple[str, int, str], soak_checks.Expected]:
    """Run `ask_one_by_one` in its own process: memory that this process had freed would hide later leaks."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(ask_one_by_one, settings, directory).result()


def ask_one_by_one(settings: Settings, directory: Path) -> dict[tuple[str, int, str], soak_checks.Expected]:
    """By kind, number and method: a fresh engine over all documents, with memory for all blocks and no prefix tree."""
    torch.set_num_threads(settings.threads)
    corpus, found = settings.corpus(), {}
    with rc.RagCache.open(directory, model="mini", store=settings.store(1 << 30, 0)) as kb:
        kb.ingest([*corpus.staying, *corpus.passing])
        door = soak_load.EngineDoor(kb)
        asked = [one for kind, own in corpus.questions.items() if kind != soak_checks.OPEN for one in own]
        for done, question in enumerate(asked, 1):
            for method in settings.methods:
                heard = soak_load.Heard()
                door.ask(question, method, heard)
                found[question.kind, question.number, method] = soak_checks.Expected(heard.text, heard.sources)
            print(f"\rexpected answers: {done} of {len(asked)} questions", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return found


@dataclass
class Serving:
    """`ragcache serve` in its own process. exit_status: once it has ended."""

    process: subprocess.Popen[str]
    url: str
    log: Path
    exit_status: int | None = None

    def stop(self) -> int:
        """Stop it as an operator would. Killed, and so counted as failed, when it does not end."""
        self.process.send_signal(signal.SIGTERM)
        try:
            self.exit_status = self.process.wait(SERVER_STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.exit_status = self.process.wait()
        return self.exit_status

    def logged_errors(self) -> int:
        """Count unusual lines of its log: errors, and lines that are not in the log's form (a traceback)."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return sum(1 for line in lines if not re.match(r'\{.*"level": "(info|warning)"', line, re.IGNORECASE))


@contextmanager
def serving(settings: Settings, store: Path, log: Path) -> Iterator[Serving]:
    """Run the server. Raises ConfigError if it does not start."""
    options = {
        "--store": store, "--port": 0, "--memory": settings.memory, "--prefix-memory": settings.prefix_memory,
        "--codec": settings.codec,
        "--eviction": settings.eviction, "--admission": settings.admission, "--slots": settings.askers,
    }  # fmt: skip
    command = [sys.executable, "-m", "ragcache", "serve", *(str(part) for pair in options.items() for part in pair)]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RAGCACHE_")}
    environ = {**clean, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(settings.threads)}
    with log.open("w") as said:
        process = subprocess.Popen(command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=said, text=True)
    assert process.stdout is not None
    try:
        waiting = threading.Timer(SERVER_START_S, process.kill)
        waiting.start()
        url = re.search(r"http://\S+?(?=/v1)", process.stdout.readline())
        waiting.cancel()
        if url is None:
            raise ConfigError(f"the server did not start; {log} says why")
        yield Serving(process, url[0], log)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        process.stdout.close()


def sample(process: str, pid: int, at_s: float, tier_bytes: int) -> soak_checks.Sample:
    """Look at a process through /proc (Linux)."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    times = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return soak_checks.Sample(
        process, at_s,
        rss_bytes=1024 * int(status["VmRSS"].split()[0]),
        anonymous_bytes=1024 * int(status["RssAnon"].split()[0]),
        descriptors=len(os.listdir(f"/proc/{pid}/fd")),
        threads=int(status["Threads"]),
        cpu_s=(int(times[11]) + int(times[12])) / os.sysconf("SC_CLK_TCK"),
        tier_bytes=tier_bytes,
        allocated_bytes=allocated_bytes() if pid == os.getpid() else None,
    )  # fmt: skip


@dataclass
class Run:
    """A soak: the store, its two doors, and all their users."""

    settings: Settings
    corpus: soak_load.Corpus
    journal: soak_load.Journal
    doors: dict[str, soak_load.Door]
    pids: dict[str, int]
    stop: threading.Event = field(default_factory=threading.Event)
    samples: list[soak_checks.Sample] = field(default_factory=list)

    def __post_init__(self) -> None:
        settings, doors, recent = self.settings, list(self.doors.values()), soak_load.Recent()
        self.askers = [
            soak_load.Asker(
                n, doors[n % len(doors)], self.corpus, settings.methods, self.journal, recent, settings.seed
            )
            for n in range(settings.askers)
        ]
        self.changers = [
            soak_load.Changer(door, dict(list(enumerate(self.corpus.passing))[n :: len(doors)]), self.journal, recent,
                    f"{settings.seed}/changes/{n}")
            for n, door in enumerate(doors)
        ]  # fmt: skip

    def go(self) -> None:
        """Ask and change for the time that was set; then delete every passing document."""
        settings = self.settings
        workers = [
            *(
                threading.Thread(target=one.run, args=[soak_load.Pace(settings.think_s, self.stop)])
                for one in self.askers
            ),
            *(
                threading.Thread(target=one.run, args=[soak_load.Pace(settings.change_s, self.stop)])
                for one in self.changers
            ),
        ]
        for worker in workers:
            worker.start()
        try:
            self._watch()
        finally:
            self.stop.set()
            for worker in workers:
                worker.join()
        for changer in self.changers:
            changer.remove_all()

    def _watch(self) -> None:
        journal, until = self.journal, self.journal.now() + 60 * self.settings.minutes
        while (left := until - journal.now()) > 0:
            self.stop.wait(min(left, self.settings.sample_s))
            at = journal.now()
            self.samples += [
                sample(name, self.pids[name], at, door.tier_bytes()) for name, door in self.doors.items()
            ]  # fmt: skip
            sizes = " and ".join(f"{one.rss_bytes / soak_checks.MIB:.0f}" for one in self.samples[-len(self.doors) :])
            said = f"{at / 60:6.1f} min: {journal.questions} questions, {journal.failures} failed, {journal.added} "
            said += f"documents added, {journal.deleted} deleted, {sizes} MiB"
            print(f"\r{said}", end="", file=sys.stderr, flush=True)
        print(file=sys.stderr)


def soak(
    settings: Settings, directory: Path
) -> tuple[Run, soak_checks.Counts, soak_checks.Ending, DoctorReport, dict[str, Any]]:
    """Everything but the report. directory: for stores, journals and the server's log; empty."""
    expected = expected_answers(settings, directory / "expected")
    corpus, store = settings.corpus(), directory / "kb"
    with ExitStack() as stack:
        config = settings.store(settings.memory, settings.prefix_memory)
        kb = stack.enter_context(rc.RagCache.open(store, model="mini", store=config))
        kb.ingest(corpus.staying)
        server = stack.enter_context(serving(settings, store, directory / "server.log"))
        door = soak_load.ServerDoor(server.url, "mini")
        stack.callback(door.close)
        journal = soak_load.Journal(directory)
        stack.callback(journal.close)
        run = Run(settings, corpus, journal, {"engine": soak_load.EngineDoor(kb), "server": door},
                  {"engine": os.getpid(), "server": server.process.pid})  # fmt: skip
        run.go()
        status = server.stop()
        stats = kb.store.kv.stats()
    with rc.Store.open(store) as kb:
        unreferenced = set(kb.store.kv.keys()) - set(kb.store.documents.handles())
        report = kb.doctor()
    repairs = [*report.damaged, *report.missing, *report.orphans]
    ending = soak_checks.Ending(
        unreferenced=len(unreferenced),
        repairs=len(repairs) + report.leftovers + (not report.sound and not repairs and not report.leftovers),
        damaged=stats.damaged,
        evictions=stats.evictions,
        exit_status=status,
        logged=server.logged_errors(),
    )
    asked, deleted = (
        soak_checks.read_lines(journal.asked_path, soak_checks.Asked),
        soak_checks.read_lines(journal.deleted_path, soak_checks.Deleted),
    )
    return (
        run,
        soak_checks.count(asked, deleted, expected),
        ending,
        report,
        {"kv": asdict(stats), "file_system": file_system(store)},
    )


def figures(run: Run, counts: soak_checks.Counts, ending: soak_checks.Ending, report: DoctorReport) -> dict[str, Any]:
    settings, journal, warmup_s = run.settings, run.journal, run.settings.limits.warmup_s
    flat = {
        process: {
            name: None if (found := soak_checks.growth(soak_checks.of(run.samples, process), name, warmup_s)) is None
            else {**found._asdict(), "rise": found.rise}
            for name in ("rss_bytes", "anonymous_bytes", "allocated_bytes", "descriptors", "threads")
        }
        for process in soak_checks.processes(run.samples)
    }  # fmt: skip
    return {
        "questions": counts.asked, "answered": counts.answered, "cancelled": counts.cancelled,
        "compared": counts.compared, "failed": counts.failed[:SHOWN], "unlike": counts.unlike[:SHOWN],
        "stale": counts.stale[:SHOWN], "added": journal.added, "deleted": journal.deleted,
        "busy": journal.busy, "failed_changes": journal.failed_changes[:SHOWN],
        "ttft_ms": ttft(journal.asked_path), "by_method": by_method(journal.asked_path),
        "cores_used": cores_used(run.samples),
        "growth": flat, "limits": asdict(settings.limits), "ending": asdict(ending), "doctor": report.to_json(),
        "curve": curve(run.samples),
    }  # fmt: skip


def ttft(path: Path) -> dict[str, dict[str, float]]:
    """Return milliseconds to the first token by door, as the engine measured them, over answered questions."""
    seconds: dict[str, list[float]] = {}
    for one in soak_checks.read_lines(path, soak_checks.Asked):
        if one.outcome == soak_checks.ANSWERED and one.ttft_s is not None:
            for name in (one.via, "all"):
                seconds.setdefault(name, []).append(1000 * one.ttft_s)
    quantiles = {"p50": 0.5, "p95": 0.95, "p99": 0.99, "max": 1.0}
    return {
        name: {what: round(float(np.quantile(values, q)), 2) for what, q in quantiles.items()}
        for name, values in sorted(seconds.items())
    }


def by_method(path: Path) -> dict[str, int]:
    found: dict[str, int] = {}
    for one in soak_checks.read_lines(path, soak_checks.Asked):
        found[one.method] = found.get(one.method, 0) + 1
    return dict(sorted(found.items()))


def cores_used(samples: Sequence[soak_checks.Sample]) -> dict[str, float]:
    """Processor seconds a second, between the first sample and the last."""
    found = {}
    for process in soak_checks.processes(samples):
        own = soak_checks.of(samples, process)
        if len(own) > 1:
            found[process] = round((own[-1].cpu_s - own[0].cpu_s) / (own[-1].at_s - own[0].at_s), 3)
    return found


def curve(samples: Sequence[soak_checks.Sample]) -> dict[str, list[dict[str, float]]]:
    """Return the samples thinned out: at most this many points per process, the last always included."""
    found = {}
    for process in soak_checks.processes(samples):
        own = soak_checks.of(samples, process)
        step = max(1, -(-len(own) // CURVE_POINTS))
        found[process] = [
            {
                "at_s": round(one.at_s, 1), "rss_mib": round(one.rss_bytes / soak_checks.MIB, 1),
                "anonymous_mib": round(one.anonymous_bytes / soak_checks.MIB, 1), "descriptors": one.descriptors,
                "threads": one.threads,
                **({} if one.allocated_bytes is None
                   else {"allocated_mib": round(one.allocated_bytes / soak_checks.MIB, 1)}),
            }
            for one in own[::-step][::-1]
        ]  # fmt: skip
    return found


FEW = ("questions", "answered", "cancelled", "compared", "added", "deleted", "busy", "ttft_ms", "cores_used")
"""Figures that are read at a glance."""


def measure(settings: Settings, surroundings: Surroundings) -> Result:
    random.seed(settings.seed)
    directory = settings.keep or surroundings.workdir
    directory.mkdir(parents=True, exist_ok=True)
    run, counts, ending, report, more = soak(settings, directory)
    measured = {**figures(run, counts, ending, report), **more}
    held = soak_checks.goals(counts, run.journal.failed_changes, run.samples, ending, settings.limits, settings.memory)
    return surroundings.result(figures=measured, goals=held)


def markdown(found: Mapping[str, Any]) -> list[str]:
    """Return the page of a result's file."""
    rows = [f"| {name} | {found['figures'][name]} |" for name in FEW]
    return ["# Soak", "", where_line(found), "", "| figure | value |", "|---|---|", *rows, "", *goal_lines(found)]


def failed(result: Result) -> bool:
    """Return whether a check that applies was not met: the command's exit status is 1 then."""
    return not all(goal.within for goal in result.goals if goal.applies)
