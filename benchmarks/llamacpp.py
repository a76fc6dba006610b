"""ragcache's engine inside llama.cpp beside llama-cpp-python alone with its prompt cache, on a GGUF file.

python -m benchmarks llamacpp --model model.gguf

The passages were read beforehand, and each question has them in another order. All processes run the same build of
llama.cpp with the same context and threads; while one answers, the others are stopped. Every question goes to all of
them, so figures are compared in pairs. llama.cpp alone runs in two processes, with flash attention, which reads prompts
faster on a CPU, and without it, which decodes faster; the better of both counts for each figure.
"""

from __future__ import annotations

import random
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers_processes import PeerProcess, PeerSpec, WorkerSettings
from benchmarks.report import Goal, Result
from benchmarks.runner import Run
from benchmarks.timing import Ratio, Timing
from ragcache.models.gguf_header import read_header

OURS = PeerSpec("ragcache", "ragcache_llamacpp_worker", None, ("memory", "disk"))
THEIRS = (PeerSpec("llama.cpp", "llamacpp_worker", None), PeerSpec("llama.cpp, flash", "llamacpp_worker", None))
FIRST, DISK, DECODE, ASKERS, MEMORY = "first token", "first token, from disk", "decode", "askers, answers/s", "memory"
GOALS = (
    (FIRST, "at most", 0.06),
    (DISK, "at most", 0.10),
    (DECODE, "at least", 0.97),
    (ASKERS, "at least", 6.0),
    (MEMORY, "at most", 1.1),
)


@dataclass(frozen=True)
class Settings(WorkerSettings):
    """passages x tokens of context, then suffix tokens; answer: tokens decoded

    model:  a GGUF file
    pairs:  number of single questions
    bursts: number of bursts after them, each of `askers` questions at the same moment
    kv_mib: size of each process's cache in memory
    """

    model: Path = Path("model.gguf")
    passages: int = 10
    tokens: int = 500
    suffix: int = 30
    answer: int = 16
    pairs: int = 10
    askers: int = 8
    bursts: int = 2


def measure(settings: Settings, run: Run) -> Result:
    draw = random.Random(settings.seed)
    vocab_size = int(read_header(settings.model).keys["tokenizer.ggml.tokens"]) // 2
    prompt = settings.passages * settings.tokens + settings.suffix + settings.answer
    config = settings.config(settings.model.absolute(), "bfloat16", 2 * prompt, settings.askers)

    def ids(count: int) -> list[int]:
        return [draw.randrange(vocab_size) for _ in range(count)]

    def question() -> dict[str, Any]:
        return {"passages": draw.sample(pool, len(pool)), "suffix": ids(settings.suffix)}

    pool = [ids(settings.tokens) for _ in range(settings.passages)]
    with ExitStack() as stack:
        peers = []
        for spec in (OURS, *THEIRS):
            own = {**config, "flash": spec is THEIRS[1], "gguf": config["model"]}
            directory = run.workdir / spec.name.replace(", ", "-")
            peers.append(stack.enter_context(PeerProcess(spec, settings.environments, own, directory)))
        ours, *theirs = peers
        ours.read(pool)
        for peer, variant in ((ours, "memory"), (ours, "disk"), *((one, "") for one in theirs)):
            peer.ask(variant, [question()], 2)  # warms up
        ratios: dict[str, list[float]] = {name: [] for name, _, _ in GOALS}
        seconds: dict[str, list[float]] = {"ragcache, memory": [], "ragcache, disk": []}
        seconds |= {spec.name: [] for spec in THEIRS}
        for _ in range(settings.pairs):
            asked = [question()]
            alone = [peer.ask("", asked, settings.answer)[0] for peer in theirs]
            first_s = min(one.first_s for one in alone)
            (disk,) = ours.ask("disk", asked, settings.answer)
            (memory,) = ours.ask("memory", [question()], settings.answer)
            for row, one in zip(seconds, (memory, disk, *alone), strict=True):
                seconds[row].append(one.first_s)
            ratios[FIRST].append(memory.first_s / first_s)
            ratios[DISK].append(disk.first_s / first_s)
            ratios[DECODE].append(min(one.total_s - one.first_s for one in alone) / (memory.total_s - memory.first_s))
        for _ in range(settings.bursts):
            asked = [question() for _ in range(settings.askers)]
            own_s = max(one.total_s for one in ours.ask("memory", asked, settings.answer))
            alone_s = min(max(one.total_s for one in peer.ask("", asked, settings.answer)) for peer in theirs)
            ratios[ASKERS].append(alone_s / own_s)
        ratios[MEMORY].append(ours.peak_bytes() / min(peer.peak_bytes() for peer in theirs))
        figures = {"peak_bytes": {peer.spec.name: peer.peak_bytes() for peer in peers}, "cells": config["max_tokens"]}
    found = {name: Ratio.of(values) for name, values in ratios.items() if values}
    applies = (settings.passages, settings.tokens, settings.suffix, settings.askers) == (10, 500, 30, 8)
    goals = [Goal.of(what, kind, limit, found[what], applies) for what, kind, limit in GOALS if what in found]
    timings = {row: Timing.of(values) for row, values in seconds.items()}
    return run.result(timings, found, figures, goals)
