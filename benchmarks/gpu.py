"""Checks of this tree on a CUDA card in ten minutes: laws, first token, methods, decoding, and the rest.

    scripts/gpu                                   # or python -m benchmarks gpu
    scripts/gpu --model DIR --data DIR            # with real answers, and training
    scripts/gpu --wheels DIR                      # without a network
    scripts/gpu --vllm PYTHON                     # and blocks inside vLLM; "auto" looks for a Python that has it

Every stage is a process with its own time limit, and leaves its files in `--out`. An interrupted run goes on where it
stopped: stages that are done are not run again (`--again` runs all). `gpu.json` and `gpu.md` are written after each
stage, so the results so far remain if the machine is taken away.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.report import Result
from benchmarks.runner import Run
from benchmarks.shapes import GRAPH_MEMORY

ROOT = Path(__file__).parents[1]
TAIL = 2000  # characters of a stage's output that are kept
# By row: prefix of a stage's file, ratio in the file, name in the table, goal on an H100.
ROWS = (
    ("ttft", "floor / transformers: full prefill", "floor / full prefill", 0.076),
    ("ttft", "reposition: device memory / transformers: full prefill", "device memory / full prefill", 0.10),
    ("ttft", "reposition: pinned host memory / transformers: full prefill", "page-locked / full prefill", 0.13),
    ("ttft", "reposition: memory tier / transformers: full prefill", "memory tier / full prefill", 0.13),
    ("ttft", "reposition: disk, warm page cache / transformers: full prefill", "disk, warm / full prefill", 0.6),
    ("ttft", "reposition: disk, cold page cache / transformers: full prefill", "disk, cold / full prefill", 1.05),
    ("vllm_placing", "in vLLM: reposition / full prefill", "inside vLLM, disk, warm / vLLM's full prefill", None),
    ("decode", "ragcache / transformers: generate, tokens/s", "decode of one, tokens/s / transformers", 2.5),
)
NO_GRAPHS = {GRAPH_MEMORY: "0"}


@dataclass(frozen=True)
class Settings:
    """model, data: a real model and question sets, for answers; rows: training rows, for training
    vllm:    a Python that has vLLM, or "auto"; minutes: limit of the whole run
    again:   also run stages that are done; quick: few tokens and rounds, to try the command
    """

    device: str = "cuda"
    shape: str = "Llama-3.1-8B"
    dtype: str = "bfloat16"
    model: Path | None = None
    data: Path | None = None
    rows: Path | None = None
    vllm: str | None = None
    minutes: float = 10.0
    again: bool = False
    quick: bool = False


@dataclass
class Stage:
    """A stage of the run.

    command:     is run in the tree's root
    limit_s:     seconds after which the stage is ended; its output so far is kept
    environment: variables that are added
    skipped:     reason not to run the stage; "": it is run
    """

    name: str
    command: list[str]
    limit_s: float
    environment: dict[str, str] = field(default_factory=dict)
    skipped: str = ""


@dataclass
class Outcome:
    """The outcome of a stage. status: done, failed, out of time or skipped. tail: end of its output"""

    status: str
    seconds: float
    command: str
    tail: str


def stages(given: Settings, out: Path) -> Iterator[Stage]:
    """Yield the stages, the most important first."""
    python = [sys.executable, "-m"]
    shape = ["--shape", given.shape, "--dtype", given.dtype, "--device", given.device]
    small = given.quick

    def sizes(**numbers: int) -> list[str]:
        return [part for name, number in numbers.items() for part in (f"--{name.replace('_', '-')}", str(number))]

    def bench(name: str, *options: str, folder: str = "") -> list[str]:
        words = ["--embedder", "words"] if name in ("ttft", "askers", "ingest") else []
        return [*python, "benchmarks", name, *shape, *words, *options, "--out", str(out / folder)]

    first = sizes(passages=2, tokens=20, suffix=5, rounds=2, long_rounds=2, vectors=50) if small else ()
    few = sizes(passages=2, tokens=20, suffix=5, rounds=2, long_rounds=2) if small else sizes(rounds=10, long_rounds=5)
    tests = [*python, "pytest", "-q", "-c", os.devnull, "--rootdir", ".", "-m", "gpu", "tests/gpu"]
    tests += ["-n", "8"] if find_spec("xdist") else []
    yield Stage("laws", tests, 60, {"HF_HUB_OFFLINE": "1"})
    yield Stage("ttft", bench("ttft", *first), 75)
    yield Stage("no graphs", bench("ttft", *(first or few), folder="no-graphs"), 60, NO_GRAPHS)
    yield Stage("plain", bench("ttft", *(first or few), folder="plain"), 60, {"RAGCACHE_PLACE": "plain", **NO_GRAPHS})
    yield Stage("methods", bench("methods", *few), 75)
    decoded = sizes(tokens=4, rounds=1) if small else ()
    yield Stage("decode", bench("decode", *decoded), 45)
    yield Stage("decode, no graphs", bench("decode", *decoded, folder="no-graphs"), 45, NO_GRAPHS)
    yield Stage("askers", bench("askers", *(sizes(rounds=1, passages=2, tokens=20) if small else sizes(rounds=3))), 75)
    yield Stage("ingest", bench("ingest", *(sizes(tokens=200, rounds=1) if small else ())), 45)
    if given.vllm is not None:
        program, why = vllm_python(given.vllm, given.device)
        short = sizes(passages=2, tokens=20, suffix=5, rounds=1) if small else []
        inside = [program, *bench("vllm_placing", *short)[1:]]
        yield Stage("vllm", inside, 120, skipped=why)
        plainly = [program, *bench("vllm_placing", *short, folder="plain")[1:]]
        yield Stage("vllm, plain", plainly, 120, {"RAGCACHE_PLACE": "plain"}, skipped=why)
    if given.model is not None and given.data is not None:
        options = ["--model", str(given.model), "--data", str(given.data), "--device", given.device, "--minutes", "1"]
        yield Stage("answers", [*python, "benchmarks", "answers", *options, "--out", str(out)], 90)
    if given.model is not None and given.rows is not None:
        options = ["--model", str(given.model), "--data", str(given.rows), "--lora-rank", "16", "--minutes", "1"]
        options += ["--device", given.device, "--out", str(out / "adapter")]
        yield Stage("training", [*python, "ragcache", "train", *options], 120)


def vllm_python(named: str, device: str) -> tuple[str, str]:
    """Return a Python with vLLM, and "" or the reason why that Python is unsuitable.

    named: path of the Python; "auto": this Python if it has vLLM, or else the Python of scripts/peers-environment
    """
    made = ROOT / ".peers" / "vllm" / "bin" / "python"
    python = named if named != "auto" else (sys.executable if find_spec("vllm") else str(made))
    look = f"import sys, vllm, torch; sys.exit(not torch.cuda.is_available() if {device == 'cuda'} else 0)"
    try:
        found = subprocess.run([python, "-c", look], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.SubprocessError):
        return python, f"{python} does not run: name a Python that has vLLM, --vllm PYTHON"
    if not found.returncode:
        return python, ""
    return python, f"{python} has no {'vLLM' if 'No module' in found.stderr else 'CUDA device'}"


def measure(settings: Settings, run: Run) -> Iterator[Result]:
    """Yield a result after each stage, with the outcomes of all stages so far."""
    known = {} if settings.again else _read(run.out / f"{run.name}.json")
    every = list(stages(settings, run.out))
    for _ in run_stages(every, known, settings.minutes):
        yield run.result(figures=figures_of(run.out, known, [one.name for one in every]))


def run_stages(every: Sequence[Stage], known: dict[str, Outcome], minutes: float) -> Iterator[None]:
    """Run the stages that are not done in `known`, and put their outcomes into it. Yields after each stage."""
    end = time.monotonic() + 60 * minutes
    for stage in every:
        left = end - time.monotonic()
        if left > 0 and (stage.name not in known or known[stage.name].status != "done"):
            if stage.skipped:
                known[stage.name] = Outcome("skipped", 0.0, " ".join(stage.command), stage.skipped)
            else:
                known[stage.name] = _run(stage, min(stage.limit_s, left))
            print(f"{stage.name}: {known[stage.name].status}, {known[stage.name].seconds:.0f} s", flush=True)
        yield


def _run(stage: Stage, limit_s: float) -> Outcome:
    start = time.monotonic()
    process = subprocess.Popen(
        stage.command, cwd=ROOT, env={**os.environ, **stage.environment}, text=True, errors="replace",
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        output, status = process.communicate(timeout=limit_s)[0], "done" if process.returncode == 0 else "failed"
    except subprocess.TimeoutExpired:
        process.kill()
        output, status = process.communicate()[0], "out of time"
    return Outcome(status, round(time.monotonic() - start, 1), " ".join(stage.command), output[-TAIL:])


def _read(path: Path) -> dict[str, Outcome]:
    try:
        found = json.loads(path.read_bytes())["figures"]["stages"]
        return {name: Outcome(**one) for name, one in found.items()}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def figures_of(out: Path, outcomes: dict[str, Outcome], names: Sequence[str]) -> dict[str, Any]:
    """Return the outcomes of the stages that were run, and the ratios in their files. names: of all stages"""
    folders = (out, out / "no-graphs", out / "plain")
    return {
        "driver": _driver(),
        "rows": [[what, *(_ratio(one, file, ratio) for one in folders), goal] for file, ratio, what, goal in ROWS],
        "order": list(names),
        "stages": {name: asdict(one) for name, one in outcomes.items()},
    }


def markdown(found: dict[str, Any]) -> list[str]:
    """Return a page: ratios with their goals, then the stages."""
    hardware, figures = found["hardware"], found["figures"]
    versions = ", ".join(f"{name} {hardware[name]}" for name in ("torch", "transformers"))
    lines = [f"# {hardware['gpu'] or hardware['cpu']}", ""]
    lines += [f"{versions}; commit {hardware['commit']}; driver {figures['driver']}", ""]
    lines += ["| what | measured | without graphs | the plain way | goal on an H100 |", "|---|---|---|---|---|"]
    for *cells, goal in figures["rows"]:
        lines.append(f"| {' | '.join(cells)} | {'none' if goal is None else f'{goal:g}'} |")
    lines += ["", "| stage | outcome | seconds |", "|---|---|---|"]
    for name in figures["order"]:
        one = figures["stages"].get(name)
        cells = [one["status"], f"{one['seconds']:.0f}"] if one else ["not run", ""]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    for name, one in figures["stages"].items():
        if one["status"] != "done":
            last = [line for line in one["tail"].splitlines() if line.strip()][-1:]
            lines += ["", f"{name}: `{last[0][:200] if last else 'no output'}`"]
    return lines


def _ratio(folder: Path, prefix: str, name: str) -> str:
    for file in sorted(folder.glob(f"{prefix}-*.json")):
        found = json.loads(file.read_bytes())["ratios"].get(name)
        if found is not None:
            return f"{found['median']:.3f} ({found['low']:.3f} to {found['high']:.3f}, n={found['pairs']})"
    return "not measured"


def _driver() -> str:
    try:
        asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(asked, capture_output=True, text=True, timeout=10, check=True).stdout.split("\n")[0]
    except (OSError, subprocess.SubprocessError):
        return "unknown"
