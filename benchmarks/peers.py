"""ragcache beside its alternatives: transformers, vLLM on the CPU, llama.cpp.

scripts/peers-environment                 # once: environments of vLLM and llama.cpp
python -m benchmarks peers --peers ragcache transformers vllm llamacpp --set rounds=3

All peers load the same random weights, and get the same prompts as token ids and the same number of threads. Every peer
is a separate process. Each question goes to all peers in turn, beginning with another peer each time, and while a peer
answers the others are stopped. A peer that cannot run is reported with the reason. `python -m benchmarks.pages` copies
the tables to results/README.md.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import peers_report
from benchmarks.peer_workers.channel import Answer
from benchmarks.peers_asking import REFERENCE, Run, Table
from benchmarks.peers_processes import PEERS, PeerProcess, WorkerSettings
from benchmarks.peers_report import ANSWERS, GOALS, INSIDE, OURS
from benchmarks.peers_streams import Sizes, Streams
from benchmarks.report import Goal, Result
from benchmarks.runner import Run as Surroundings
from benchmarks.shapes import SHAPES, write_checkpoint
from benchmarks.timing import Ratio, Samples, Theft, Timing, ratio
from ragcache.errors import check_choice
from ragcache.models.load import DTYPES


@dataclass(frozen=True)
class Settings(WorkerSettings):
    """passages x tokens of context, then suffix tokens; answer: tokens decoded

    rounds:   rounds of new and again; questions: questions of random
    slow_rounds: rounds of each stream for peers that take 10 s per prompt and decide no goal
    pool:     passages known beforehand
    askers:   questions at the same moment, in each of `bursts` bursts under the first of the dtypes
    kv_mib:   size of each peer's cache
    environments: the directory that scripts/peers-environment made
    """

    peers: tuple[str, ...] = tuple(PEERS)
    dtypes: tuple[str, ...] = ("bfloat16", "float32")
    shape: str = "SmolLM2-135M"
    passages: int = 10
    tokens: int = 500
    suffix: int = 30
    answer: int = 16
    rounds: int = 10
    slow_rounds: int = 3
    questions: int = 10
    pool: int = 20
    askers: int = 8
    bursts: int = 10

    def __post_init__(self) -> None:
        for name in self.peers:
            check_choice("--peers", name, tuple(PEERS))
        for name in self.dtypes:
            check_choice("--dtypes", name, tuple(DTYPES))


def ask_everything(table: Table, settings: Settings, streams: Streams, bursts: int) -> None:
    """Ask the questions of all streams, then this many bursts of askers.

    Rows that can keep nothing between questions are asked in the stream `new` only: transformers in all others, and
    `full` over passages in an order that was not requested before.
    """
    table.warm_up()
    table.read_pool()
    for number in range(settings.rounds):
        # Over unread passages, `link` would find the blocks that `reposition` has just made.
        table.ask("new", number, streams.new(number), leave_out=["ragcache link"])
        table.ask("again", number, streams.again(number), leave_out=[REFERENCE])
    for number, question in enumerate(streams.random(settings.questions)):
        table.ask("random", number, question, leave_out=[REFERENCE, "ragcache full"])
    last, count = settings.rounds - 1, settings.askers
    for burst in range(bursts):
        askers = range(1 + burst * count, 1 + (burst + 1) * count)
        over_the_same = [streams.again(last, asker) for asker in askers]
        table.ask_together("again", burst, over_the_same, leave_out=[REFERENCE, "ragcache link"])
    for burst in range(bursts):
        elsewhere = streams.random(count, f"askers {burst}")
        left_out = [REFERENCE, "ragcache full", "ragcache link"]
        table.ask_together("random", burst, elsewhere, leave_out=left_out)


def run_dtype(settings: Settings, dtype: str, bursts: int, workdir: Path, streams: Streams) -> Run:
    table = Table(Run(dtype), streams, settings.answer, settings.slow_rounds)
    longest = settings.passages * settings.tokens + settings.suffix + settings.answer
    config = settings.config(workdir / "model", dtype, longest, settings.askers)
    with ExitStack() as stack:
        for name in settings.peers:
            own = settings.environments.resolve(), config, workdir / f"{dtype}-{name}"
            table.start(name, partial(PeerProcess, PEERS[name], *own), stack)
        ask_everything(table, settings, streams, bursts)
    return table.run


def measure(settings: Settings, run: Surroundings) -> Iterator[Result]:
    """Yield a result after each dtype, because a run takes more than an hour."""
    theft = Theft()
    write_checkpoint(run.workdir / "model", settings.shape, settings.seed, sharp=True)
    streams = Streams(sizes_of(settings))
    runs: list[Run] = []
    for dtype in settings.dtypes:
        runs.append(run_dtype(settings, dtype, 0 if runs else settings.bursts, run.workdir, streams))
        ratios = {name: found for one in runs for name, found in ratios_of(one)}
        timings = {f"{one.dtype}, {cell}: {row}": timing for one in runs for cell, row, timing in timings_of(one)}
        figures = {"dtypes": {one.dtype: figures_of(one) for one in runs}}
        asked = replace(settings, dtypes=tuple(one.dtype for one in runs))
        held = list(goals(settings, ratios))
        yield run.result(timings, ratios, figures, held, settings=asked, stolen_share=round(theft.share(), 3))


def markdown(found: Mapping[str, Any]) -> list[str]:
    """Return the page of results/peers.json."""
    return ["# Against what users would pick instead", "", *peers_report.markdown(found)]


def sizes_of(settings: Settings) -> Sizes:
    vocab_size = int(SHAPES[settings.shape]["vocab_size"])
    names = ("passages", "tokens", "suffix", "pool", "seed")
    return Sizes(vocab_size=vocab_size, **{name: getattr(settings, name) for name in names})


def timings_of(run: Run) -> Iterator[tuple[str, str, Timing]]:
    """Yield the stream, the row and its times to the first token."""
    for cell, rows in run.answers.items():
        for row, answers in rows.items():
            yield cell, row, Timing.of([answer.first_s for answer in answers.values()])


def ratios_of(run: Run) -> Iterator[tuple[str, Ratio]]:
    """Yield names and ratios of ragcache's rows to the other rows, question by question.

    Ratios are of the time to the first token, and of answers/s of a single asker and of bursts. Two more compare
    streams: first tokens over passages that ragcache has read against the others' over new passages, and over random
    passages against the others' over a prompt that they have read. Rows that do not compute the same as transformers
    are left out.
    """
    firsts = {cell: {row: first_tokens(answers) for row, answers in rows.items()} for cell, rows in run.answers.items()}
    rates = {
        cell: {row: {n: 1 / one.total_s for n, one in answers.items()} for row, answers in rows.items()}
        for cell, rows in run.answers.items()
    }
    bursts = {
        cell: {row: {n: rate_of(answers) for n, answers in one.items()} for row, one in rows.items()}
        for cell, rows in run.together.items()
    }
    for above in (OURS, INSIDE):
        for cell, rows in firsts.items():
            yield from _paired(run, cell, above, rows)
        for cell, rows in rates.items():
            yield from _paired(run, f"{cell}, {ANSWERS}", above, rows)
        for cell, rows in bursts.items():
            yield from _paired(run, f"{cell}, askers, {ANSWERS}", above, rows)
        for cell, other in (("again", "new"), ("random", "again")):
            theirs = {f"{other}: {row}": found for row, found in firsts.get(other, {}).items()}
            ours = {row: found for row, found in firsts.get(cell, {}).items() if row == above}
            yield from _paired(run, cell, above, {**ours, **theirs})


def _paired(run: Run, where: str, above: str, samples: Samples) -> Iterator[tuple[str, Ratio]]:
    for row in samples:
        if row != above and above in samples and run.agrees(row.partition(": ")[2] or row):
            yield f"{run.dtype}, {where}: {above} / {row}", ratio(samples, above, row)


def rate_of(answers: Sequence[Answer]) -> float:
    """Return the answers/s of a burst, until the last answer's end."""
    return len(answers) / max(answer.total_s for answer in answers)


def first_tokens(answers: Mapping[int, Answer]) -> dict[int, float]:
    return {number: answer.first_s for number, answer in answers.items()}


def figures_of(run: Run) -> dict[str, Any]:
    """Return a dtype's figures. cells: medians by stream and row; together: the same for bursts of askers"""
    return {
        "peers": run.about,
        "not_run": run.missing,
        "read_s": run.read_s,
        "agreement": {row: {**same, "agrees": run.agrees(row)} for row, same in run.same.items()},
        "cells": {
            cell: {row: cell_of(list(answers.values())) for row, answers in rows.items()}
            for cell, rows in run.answers.items()
        },
        "together": {
            cell: {row: together_of(answers) for row, answers in rows.items()} for cell, rows in run.together.items()
        },
    }


def cell_of(answers: Sequence[Answer]) -> dict[str, float]:
    return {
        "questions": len(answers),
        "first_s": statistics.median(answer.first_s for answer in answers),
        "answer_s": statistics.median(answer.total_s for answer in answers),
        "answers_per_s": len(answers) / sum(answer.total_s for answer in answers),
        "reused_tokens": statistics.fmean(answer.reused for answer in answers),
    }


def together_of(bursts: Mapping[int, Sequence[Answer]]) -> dict[str, float]:
    every = [answer for answers in bursts.values() for answer in answers]
    return {
        "askers": len(next(iter(bursts.values()))),
        "bursts": len(bursts),
        "answers_per_s": statistics.median(rate_of(answers) for answers in bursts.values()),
        "first_s_median": statistics.median(answer.first_s for answer in every),
        "first_s_max": statistics.median(max(one.first_s for one in answers) for answers in bursts.values()),
        "reused_tokens": statistics.fmean(answer.reused for answer in every),
    }


def goals(settings: Settings, ratios: Mapping[str, Ratio]) -> Iterator[Goal]:
    sizes = (settings.passages, settings.tokens, settings.suffix, settings.shape) == (10, 500, 30, "SmolLM2-135M")
    for what, kind, limit in GOALS:
        if what in ratios:
            applies = sizes and ("askers" not in what or settings.askers == 8)
            yield Goal.of(what, kind, limit, ratios[what], applies)
