"""What a CUDA card does with this tree, in one run of ten minutes: laws, first token, methods, decoding, and the rest.

    scripts/gpu                                   # or python -m benchmarks.gpu
    scripts/gpu --model DIR --data DIR            # with real answers, and training
    scripts/gpu --wheels DIR                      # without a network
    scripts/gpu --vllm [PYTHON]                   # and blocks inside vLLM, by a Python that has it

Every stage is a process with a time limit of its own and leaves its files in `--out`. A run that was broken off goes on
where it stopped: stages that are done are not run again (`--again` runs all). `gpu.json` and `gpu.md` are written anew
after each stage, so that what is there counts whenever the machine goes away.
"""

from __future__ import annotations

import argparse
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

import torch

from benchmarks.environment import environment
from benchmarks.shapes import GRAPH_MEMORY
from ragcache.files import atomic_write, write_all

ROOT = Path(__file__).parents[1]
OUT = Path("gpu-results")
TAIL = 2000  # characters of a stage's output that are kept
SHAPE, DTYPE = "Llama-3.1-8B", "bfloat16"
# File of a stage, ratio in it, name in the table, goal on an H100.
ROWS = (
    ("ttft", "floor / transformers: full prefill", "floor / full prefill", 0.076),
    ("ttft", "reposition: device memory / transformers: full prefill", "device memory / full prefill", 0.10),
    ("ttft", "reposition: pinned host memory / transformers: full prefill", "page-locked / full prefill", 0.13),
    ("ttft", "reposition: memory tier / transformers: full prefill", "memory tier / full prefill", 0.13),
    ("ttft", "reposition: disk, warm page cache / transformers: full prefill", "disk, warm / full prefill", 0.6),
    ("ttft", "reposition: disk, cold page cache / transformers: full prefill", "disk, cold / full prefill", 1.05),
    ("vllm", "in vLLM: reposition / full prefill", "inside vLLM, disk, warm / vLLM's full prefill", None),
    ("decode", "ragcache / transformers: generate, tokens/s", "decode of one, tokens/s / transformers", 2.5),
)
NO_GRAPHS = {GRAPH_MEMORY: "0"}


@dataclass
class Stage:
    """command: run in the tree's root. limit_s: it is ended then, and what it wrote counts. environment: added.
    skipped: why it is not run; empty: it is"""

    name: str
    command: list[str]
    limit_s: float
    environment: dict[str, str] = field(default_factory=dict)
    skipped: str = ""


@dataclass
class Outcome:
    """status: done, failed, out of time or skipped. tail: of its output"""

    status: str
    seconds: float
    command: str
    tail: str


def stages(given: argparse.Namespace) -> Iterator[Stage]:
    """In the order of what is most wanted."""
    python = [sys.executable, "-m"]
    shape = ["--shape", given.shape, "--dtype", given.dtype, "--device", given.device]
    small = given.quick

    def sizes(**numbers: int) -> list[str]:
        return [part for name, number in numbers.items() for part in (f"--{name.replace('_', '-')}", str(number))]

    def bench(name: str, *options: str, folder: str = "") -> list[str]:
        return [*python, "benchmarks.gpu", "--only", name, *shape, "--out", str(given.out / folder), "--", *options]

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
    yield Stage("ops", [*python, "benchmarks.ops"], 30)
    if given.vllm is not None:
        program, why = vllm_python(given.vllm, given.device)
        inside = [program, "-m", "benchmarks.vllm_placing", *shape]
        inside += sizes(passages=2, tokens=20, suffix=5, rounds=1) if small else ()
        yield Stage("vllm", [*inside, "--out", str(given.out)], 120, skipped=why)
        plain = {"RAGCACHE_PLACE": "plain"}
        yield Stage("vllm, plain", [*inside, "--out", str(given.out / "plain")], 120, plain, skipped=why)
    if given.model is not None and given.data is not None:
        options = ["--model", str(given.model), "--data", str(given.data), "--device", given.device, "--minutes", "1"]
        yield Stage("answers", [*python, "benchmarks.answers", *options, "--out", str(given.out)], 90)
    if given.model is not None and given.rows is not None:
        options = ["--model", str(given.model), "--data", str(given.rows), "--lora-rank", "16", "--minutes", "1"]
        options += ["--device", given.device, "--out", str(given.out / "adapter")]
        yield Stage("training", [*python, "ragcache", "train", *options], 120)


def vllm_python(named: str, device: str) -> tuple[str, str]:
    """A Python with vLLM: the one named, this one, or the one that scripts/peers-environment made; and why none of them
    will do."""
    made = ROOT / ".peers" / "vllm" / "bin" / "python"
    python = named or (sys.executable if find_spec("vllm") else str(made))
    look = f"import sys, vllm, torch; sys.exit(not torch.cuda.is_available() if {device == 'cuda'} else 0)"
    try:
        found = subprocess.run([python, "-c", look], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.SubprocessError):
        return python, f"{python} does not run: name a Python that has vLLM, --vllm PYTHON"
    if not found.returncode:
        return python, ""
    return python, f"{python} has no {'vLLM' if 'No module' in found.stderr else 'CUDA device'}"


def run(every: Sequence[Stage], out: Path, minutes: float, again: bool = False) -> dict[str, Outcome]:
    """Run what is not done, and write the outcome after each."""
    out.mkdir(parents=True, exist_ok=True)
    known = {} if again else _read(out)
    end = time.monotonic() + 60 * minutes
    for stage in every:
        left = end - time.monotonic()
        if left <= 0 or (stage.name in known and known[stage.name].status == "done"):
            continue
        if stage.skipped:
            known[stage.name] = Outcome("skipped", 0.0, " ".join(stage.command), stage.skipped)
        else:
            known[stage.name] = _run(stage, min(stage.limit_s, left))
        print(f"{stage.name}: {known[stage.name].status}, {known[stage.name].seconds:.0f} s", flush=True)
        _write(out, known, [one.name for one in every])
    return known


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


def _read(out: Path) -> dict[str, Outcome]:
    try:
        found = json.loads((out / "gpu.json").read_bytes())["stages"]
        return {name: Outcome(**one) for name, one in found.items()}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _write(out: Path, outcomes: dict[str, Outcome], names: Sequence[str]) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    hardware = asdict(environment("benchmarks.gpu", [], device))
    found = {"hardware": hardware, "stages": {name: asdict(one) for name, one in outcomes.items()}}
    for name, text in (
        ("gpu.json", json.dumps(found, indent=1) + "\n"),
        ("gpu.md", page(out, outcomes, names, hardware)),
    ):
        with atomic_write(out / name) as file:
            write_all(file, text.encode())


def page(out: Path, outcomes: dict[str, Outcome], names: Sequence[str], hardware: dict[str, Any]) -> str:
    """The Markdown page: ratios with their goals, then the stages."""
    card = hardware["gpu"] or hardware["cpu"]
    versions = ", ".join(f"{name} {hardware[name]}" for name in ("torch", "transformers"))
    lines = [f"# {card}", "", f"{versions}; commit {hardware['commit']}; driver {_driver()}", ""]
    lines += ["| what | measured | without graphs | the plain way | goal on an H100 |", "|---|---|---|---|---|"]
    for prefix, ratio, what, goal in ROWS:
        found = [_ratio(folder, prefix, ratio) for folder in (out, out / "no-graphs", out / "plain")]
        lines.append(f"| {what} | {' | '.join(found)} | {'none' if goal is None else f'{goal:g}'} |")
    lines += ["", "| stage | outcome | seconds |", "|---|---|---|"]
    for name in names:
        one = outcomes.get(name)
        lines.append(f"| {name} | {one.status if one else 'not run'} | {f'{one.seconds:.0f}' if one else ''} |")
    for name, one in outcomes.items():
        if one.status != "done":
            last = [line for line in one.tail.splitlines() if line.strip()][-1:]
            lines += ["", f"{name}: `{last[0][:200] if last else 'no output'}`"]
    return "\n".join(lines) + "\n"


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


def _one(name: str, arguments: list[str]) -> None:
    """A benchmark in this process, with an embedder that needs no weights."""
    from benchmarks import askers, decode, ingest, methods, ttft
    from ragcache_demo.bag_of_words import BagOfWords

    mains: dict[str, Any] = {"methods": methods.main, "decode": decode.main, "askers": askers.main}
    with_embedder: dict[str, Any] = {"ttft": ttft.main, "ingest": ingest.main}
    if name in mains:
        mains[name](arguments)
    else:
        with_embedder[name](arguments, lambda: BagOfWords())


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser("benchmarks.gpu", description=__doc__)
    made.add_argument("--device", default="cuda")
    made.add_argument("--shape", default=SHAPE)
    made.add_argument("--dtype", default=DTYPE)
    made.add_argument("--model", type=Path, help="directory of a real model, for answers and training")
    made.add_argument("--data", type=Path, help="directory of question sets, for answers")
    made.add_argument("--rows", type=Path, help="training rows")
    made.add_argument(
        "--vllm", nargs="?", const="", metavar="PYTHON", help="and blocks inside vLLM, by a Python that has it"
    )
    made.add_argument("--minutes", type=float, default=10, help="of the whole run")
    made.add_argument("--again", action="store_true", help="run stages that are done, too")
    made.add_argument("--quick", action="store_true", help="few tokens and rounds: to see that it runs")
    made.add_argument("--out", type=Path, default=OUT)
    made.add_argument("--only", help=argparse.SUPPRESS)  # a stage's own process
    made.add_argument("rest", nargs="*", help=argparse.SUPPRESS)
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    given = parser().parse_args(sys.argv[1:] if arguments is None else arguments)
    if given.only:
        common = ["--shape", given.shape, "--dtype", given.dtype, "--device", given.device, "--out", str(given.out)]
        _one(given.only, [*common, *given.rest])
        return
    run(list(stages(given)), given.out, given.minutes, given.again)
    print((given.out / "gpu.md").read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
