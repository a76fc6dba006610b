"""ragcache beside what users would pick instead: transformers, vLLM on the CPU, llama.cpp.

scripts/peers-environment                 # once: environments of vLLM and llama.cpp
python -m benchmarks.peers --peers ragcache,transformers,vllm,llamacpp --rounds 3

The same random weights, saved once and loaded by all; the same prompts, as token ids; the same number of threads. Every
peer is a process of its own; one question goes to all peers in turn, each question beginning with another peer, and
while one answers the others are stopped. A peer that cannot run is reported with the reason. Writes results/peers.json
and results/peers.md; `python -m benchmarks.pages` takes the tables into docs/results.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig

from benchmarks.environment import Environment, environment
from benchmarks.options import add_numbers, add_places, settings_from
from benchmarks.peer_workers.channel import Answer
from benchmarks.peers_asking import REFERENCE, Run, Table
from benchmarks.peers_checkpoint import write_checkpoint
from benchmarks.peers_processes import PEERS, ROOT, PeerProcess
from benchmarks.peers_report import ANSWERS, GOALS, INSIDE, OURS, markdown
from benchmarks.peers_streams import SCRIPTED_ANSWER_TOKENS, Sizes, Streams, prefix_share
from benchmarks.report import Goal, Result, write
from benchmarks.shapes import SHAPES
from benchmarks.timing import Ratio, Samples, Theft, Timing, ratio
from ragcache.models.load import DTYPES

LONG_STREAM = 10_000
LARGE_POOL = 1_000


@dataclass(frozen=True)
class Settings:
    """passages x tokens of context, then suffix tokens; answer: tokens decoded

    peers, dtypes: comma-separated; the first dtype is asked everything, others `new`, `again` and `random` only
    rounds:   of new and again; questions: of random and zipf; conversations x turns
    slow_rounds: of each, for peers that take 10 s a prompt and decide no goal
    pool:     passages known beforehand; zipf: exponent
    askers:   that ask at the same moment, in so many bursts
    kv_mib:   of each peer's cache
    """

    peers: str = ",".join(PEERS)
    dtypes: str = "bfloat16,float32"
    shape: str = "SmolLM2-135M"
    passages: int = 10
    tokens: int = 500
    suffix: int = 30
    answer: int = 16
    rounds: int = 10
    slow_rounds: int = 3
    questions: int = 10
    conversations: int = 4
    turns: int = 3
    pool: int = 20
    zipf: float = 1.0
    askers: int = 8
    bursts: int = 10
    kv_mib: int = 2048
    threads: int = 2
    seed: int = 0


@dataclass(frozen=True)
class Places:
    """workdir: for the checkpoint, what peers write, and their logs"""

    workdir: Path
    environments: Path

    @property
    def model(self) -> Path:
        return self.workdir / "model"


def ask_everything(table: Table, settings: Settings, streams: Streams, *, whole: bool) -> None:
    """whole: all streams; else those that need the fewest questions.

    Where a row has nothing to keep from one question to the next, one stream says it all: transformers, and `full` over
    passages that were not asked for in this order, are asked `new` alone.
    """
    table.warm_up()
    table.read_pool()
    for number in range(settings.rounds):
        # Over passages that nobody read, `link` would find the blocks that `reposition` has just made.
        table.ask("new", number, streams.new(number), leave_out=["ragcache link"])
        table.ask("again", number, streams.again(number), leave_out=[REFERENCE])
    for number, question in enumerate(streams.random(settings.questions)):
        table.ask("random", number, question, leave_out=[REFERENCE, "ragcache full"])
    if not whole:
        return
    for number, question in enumerate(streams.zipf(settings.questions)):
        table.ask("zipf", number, question, leave_out=[REFERENCE, "ragcache full"])
    for turn, questions in enumerate(streams.conversations(settings.conversations, settings.turns)):
        for number, question in enumerate(questions):
            at = number * (settings.turns - 1) + turn - 1 if turn else number
            table.ask("later turn" if turn else "first turn", at, question, leave_out=[REFERENCE])
    ask_together(table, settings, streams)


def ask_together(table: Table, settings: Settings, streams: Streams) -> None:
    last, count = settings.rounds - 1, settings.askers
    for burst in range(settings.bursts):
        askers = range(1 + burst * count, 1 + (burst + 1) * count)
        over_the_same = [streams.again(last, asker) for asker in askers]
        table.ask_together("again", burst, over_the_same, leave_out=[REFERENCE, "ragcache link"])
    for burst in range(settings.bursts):
        elsewhere = streams.random(count, f"askers {burst}")
        left_out = [REFERENCE, "ragcache full", "ragcache link"]
        table.ask_together("random", burst, elsewhere, leave_out=left_out)


def run_dtype(settings: Settings, dtype: str, whole: bool, places: Places, streams: Streams) -> Run:
    table = Table(Run(dtype), settings, streams)
    with ExitStack() as stack:
        for name in settings.peers.split(","):
            directory = places.workdir / f"{dtype}-{name}"
            directory.mkdir()
            config = {
                "model": str(places.model),
                "dtype": dtype,
                "threads": settings.threads,
                "kv_bytes": settings.kv_mib << 20,
                "max_tokens": longest(settings),
                "askers": settings.askers,
                "directory": str(directory),
            }
            start = partial(PeerProcess, PEERS[name], places.environments, config, directory / "log.txt")
            table.start(name, start, stack)
        ask_everything(table, settings, streams, whole=whole)
    return table.run


def longest(settings: Settings) -> int:
    """Tokens of the longest prompt with its answer, rounded up to what caches are made in."""
    turns = settings.turns * (settings.suffix + SCRIPTED_ANSWER_TOKENS)
    tokens = settings.passages * settings.tokens + turns + settings.answer
    return -(-tokens // 256) * 256


def measure(settings: Settings, places: Places, arguments: Sequence[str]) -> Iterator[Result]:
    """A result after each dtype: a run takes more than an hour, and what is there is kept."""
    torch.set_num_threads(settings.threads)  # of this process, which computes nothing; stated in the result
    hardware = environment("benchmarks.peers", arguments, torch.device("cpu"))
    theft = Theft()
    write_checkpoint(places.model, settings.shape, settings.seed)
    streams = Streams(sizes_of(settings))
    runs: list[Run] = []
    for dtype in settings.dtypes.split(","):
        runs.append(run_dtype(settings, dtype, not runs, places, streams))
        result = result_of(replace(settings, dtypes=",".join(run.dtype for run in runs)), hardware, runs)
        yield replace(result, stolen_share=round(theft.share(), 3))


def result_of(settings: Settings, hardware: Environment, runs: Sequence[Run]) -> Result:
    ratios = {name: found for run in runs for name, found in ratios_of(run)}
    figures = {
        "dtypes": {run.dtype: figures_of(run) for run in runs},
        "prefix_share": prefix_shares(settings),
    }
    timings = {f"{run.dtype}, {cell}: {row}": timing for run in runs for cell, row, timing in timings_of(run)}
    return Result("peers", settings, hardware, timings, ratios, figures, list(goals(settings, ratios)))


def prefix_shares(settings: Settings) -> dict[str, Any]:
    """What a prefix cache finds in the long run, of this pool and of a larger one, with room in the first dtype."""
    shape = LlamaConfig(**SHAPES[settings.shape])
    width = 2 * shape.num_hidden_layers * shape.num_key_value_heads * shape.head_dim
    passage_bytes = settings.tokens * width * DTYPES[settings.dtypes.split(",")[0]].itemsize
    capacity = (settings.kv_mib << 20) // passage_bytes
    pools = {}
    for pool in sorted({settings.pool, LARGE_POOL}):
        streams = Streams(replace(sizes_of(settings), pool=pool))
        drawn = {"random": streams.random(LONG_STREAM), "zipf": streams.zipf(LONG_STREAM)}
        pools[str(pool)] = {name: prefix_share(questions, capacity) for name, questions in drawn.items()}
    return {"questions": LONG_STREAM, "capacity": capacity, "pools": pools}


def sizes_of(settings: Settings) -> Sizes:
    vocab_size = int(SHAPES[settings.shape]["vocab_size"])
    names = ("passages", "tokens", "suffix", "pool", "zipf", "seed")
    return Sizes(vocab_size=vocab_size, **{name: getattr(settings, name) for name in names})


def timings_of(run: Run) -> Iterator[tuple[str, str, Timing]]:
    """Times to first token."""
    for cell, rows in run.answers.items():
        for row, answers in rows.items():
            yield cell, row, Timing.of([answer.first_s for answer in answers.values()])


def ratios_of(run: Run) -> Iterator[tuple[str, Ratio]]:
    """Ours over theirs, question by question: time to first token, and answers/s of one asker and of bursts; and first
    tokens over passages that we have read against theirs over new ones, and over random ones against theirs over a
    prompt's own prefix. Rows that do not compute what transformers does are left out."""
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
    """Answers/s of a burst, until the last one's end."""
    return len(answers) / max(answer.total_s for answer in answers)


def first_tokens(answers: Mapping[int, Answer]) -> dict[int, float]:
    return {number: answer.first_s for number, answer in answers.items()}


def figures_of(run: Run) -> dict[str, Any]:
    """cells: by stream and row, medians; together: by stream and row, askers at the same moment."""
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


def parse(arguments: Sequence[str]) -> tuple[Settings, argparse.Namespace]:
    parser = argparse.ArgumentParser("benchmarks.peers", description=__doc__)
    default = Settings()
    parser.add_argument("--peers", default=default.peers, help=f"comma-separated, of {', '.join(PEERS)}")
    parser.add_argument("--dtypes", default=default.dtypes, help="comma-separated; the first one is asked everything")
    parser.add_argument("--shape", choices=SHAPES, default=default.shape)
    parser.add_argument("--zipf", type=float, default=default.zipf)
    sizes = ("passages", "tokens", "suffix", "answer", "rounds", "slow_rounds", "questions", "conversations", "turns")
    add_numbers(parser, default, (*sizes, "pool", "askers", "bursts", "kv_mib", "threads", "seed"))
    parser.add_argument("--environments", type=Path, default=ROOT / ".peers", help="made by scripts/peers-environment")
    add_places(parser, "where the checkpoint and its GGUF file are written; a temporary directory by default")
    given = parser.parse_args(arguments)
    for option, known in (("peers", PEERS), ("dtypes", DTYPES)):
        unknown = [name for name in getattr(given, option).split(",") if name not in known]
        if unknown:
            parser.error(f"--{option}: {', '.join(map(repr, unknown))} is none of {', '.join(known)}")
    return settings_from(given, Settings), given


def main(arguments: Sequence[str] | None = None) -> Result:
    arguments = sys.argv[1:] if arguments is None else arguments
    settings, given = parse(arguments)
    if given.workdir is not None:
        given.workdir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=given.workdir, prefix="peers-") as directory:
        places = Places(Path(directory), given.environments.resolve())
        for result in measure(settings, places, arguments):
            path = write(result, given.out)
            lines = markdown(json.loads(path.read_text(encoding="utf-8")))
            (given.out / "peers.md").write_text("\n".join(["# Against what users would pick instead", "", *lines, ""]))
    print("\n".join(lines))
    return result


if __name__ == "__main__":
    main()
