"""What a measurement was taken on, and by which command."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch
import transformers


@dataclass(frozen=True)
class Environment:
    """load_1min: the machine's load average at the start, before the benchmark; near 0 on a quiet machine."""

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
    command: str
    date: str


def environment(module: str, arguments: Sequence[str], device: torch.device) -> Environment:
    """Call it before measuring. Paths in the command are cut to their names."""
    return Environment(
        cpu=_cpu_model(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        gpu=torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        load_1min=round(os.getloadavg()[0], 2),
        python=platform.python_version(),
        torch=str(torch.__version__),
        transformers=transformers.__version__,
        commit=_commit(),
        command=shlex.join(["python", "-m", module, *(_short(argument) for argument in arguments)]),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _short(argument: str) -> str:
    return Path(argument).name if Path(argument).is_absolute() else argument


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _commit() -> str | None:
    here = Path(__file__).parent
    try:
        done = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=here, capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.strip() or None
