"""The machine and software that a measurement was taken on, and its command."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch
import transformers

NOT_CODE = (":(exclude)benchmarks/results", ":(exclude,glob)**/*.md")


@dataclass(frozen=True)
class Environment:
    """The environment of a run.

    load_1min: the machine's load average before the benchmark; near 0 on a quiet machine
    clean:     whether the code is the commit's; results and pages, which benchmarks write, may differ
    """

    cpu: str
    cores: int
    threads: int
    gpu: str | None
    memory_bytes: int
    load_1min: float
    python: str
    torch: str
    transformers: str
    commit: str | None
    clean: bool
    command: str
    date: str


def load_average() -> float:
    """Return the load average over the last minute."""
    return round(os.getloadavg()[0], 2)


def settle(most: float, patience_s: float) -> bool:
    """Wait until the load average is at most `most`. Return False if it is still higher after `patience_s` seconds."""
    until = time.monotonic() + patience_s
    while load_average() > most:
        if time.monotonic() > until:
            return False
        time.sleep(1)
    return True


def environment(benchmark: str, arguments: Sequence[str], device: torch.device) -> Environment:
    """Return the environment of a run of `python -m benchmarks BENCHMARK`; call it before measuring.

    Paths in the command are cut to their names.
    """
    return Environment(
        cpu=_cpu_model(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        gpu=torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        load_1min=load_average(),
        python=platform.python_version(),
        torch=str(torch.__version__),
        transformers=transformers.__version__,
        commit=_git("describe", "--always"),
        clean=_git("status", "--porcelain", "--", ".", *NOT_CODE) == "",
        command=shlex.join(["python", "-m", "benchmarks", benchmark, *map(_short, arguments)]),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _short(argument: str) -> str:
    option, equals, value = argument.rpartition("=")
    return f"{option}{equals}{Path(value).name if Path(value).is_absolute() else value}"


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _git(*arguments: str) -> str | None:
    """Return git's output in the project's root; None if git fails."""
    root = Path(__file__).parent.parent
    try:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True)
    except OSError:
        return None
    return None if done.returncode else done.stdout.strip()
