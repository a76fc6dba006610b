"""Operations that a pass calls, counted: unlike time, a count does not depend on what else the machine does.

    python -m benchmarks.ops --shape SmolLM2-135M --passages 10 --tokens 50

Needless copies, masks and conversions show here first. Counts are of calls into ATen from Python (not of what those
call in turn), on random blocks. Where Triton is installed, placing by the kernel of a GPU is counted beside it, in
Triton's interpreter: a launch counts as one operation.

The second table is of methods: how often the host reads a tensor's value while a method reads a prompt, which on a GPU
waits each time until all is done that was launched (`benchmarks/reads.py`). It is written to `--out` and goes to
docs/methods.md.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

from rich.console import Console
from rich.table import Table
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import methods
from benchmarks.reading import Bench, truncate
from benchmarks.reads import reads_of
from benchmarks.shapes import SHAPES, Built, build
from ragcache.fusion import place_check
from ragcache.fusion.fuse import fuse
from ragcache.fusion.method import FusionMethod
from ragcache.models import language_model
from ragcache.models.batch import run_pieces

# They make views or ask for shapes: no bytes move.
FREE = frozenset(
    {"_unsafe_view", "alias", "as_strided", "detach", "expand", "lift_fresh", "permute", "select", "slice", "split"}
    | {"squeeze", "t", "transpose", "unsqueeze", "view"}
)


class _Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, calls: Counter[str] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: Counter[str] = Counter() if calls is None else calls

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def count(run: Callable[[], Any]) -> Counter[str]:
    """Calls by operation, once everything is warm."""
    run()
    calls: Counter[str] = Counter()

    def run_counted(*arguments: Any) -> Any:
        with _Counting(calls):
            return run_pieces(*arguments)

    # A mode is of one thread, and passes run in another one.
    with _Counting(calls), mock.patch.object(language_model, "run_pieces", run_counted):
        run()
    return calls


def working(calls: Counter[str]) -> int:
    """Calls that compute or move bytes."""
    return sum(number for name, number in calls.items() if name not in FREE)


class _Launches:
    """Stands for a kernel, and counts its launches as operations."""

    def __init__(self, kernel: Any, counting: _Counting) -> None:
        self._kernel = kernel
        self._counting = counting

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        def launch(*args: Any, **options: Any) -> None:
            before = Counter(self._counting.calls)
            self._kernel[grid](*args, **options)
            self._counting.calls = before  # what the interpreter itself calls is none of the card's
            self._counting.calls["kernel launch"] += 1

        return launch


def count_kernel(bench: Bench) -> Counter[str]:
    """Calls of placing by the kernel; none where Triton is absent."""
    if find_spec("triton") is None:
        return Counter()
    with mock.patch.dict(os.environ, {place_check.INTERPRET: "1"}):
        from ragcache.fusion import place_kernel

        place_check._checked.pop(bench.lm, None)
        bench.place()  # looks whether the kernel is right
        with _Counting() as counting:
            counted = _Launches(place_kernel._place, counting)
            with mock.patch.object(place_kernel, "_place", counted):
                bench.place()
        place_check._checked.pop(bench.lm, None)
    calls: Counter[str] = counting.calls
    return calls


def profile(bench: Bench) -> dict[str, Counter[str]]:
    """Counts of the floor, of placing, of fused prefill, of one step of decoding, and of transformers' reuse."""
    blocks = bench.load_memory()
    decoded = fuse(bench.lm, bench.prompt, "reposition", blocks, reserve_tokens=8)
    end = bench.prompt.num_tokens

    def step() -> None:
        truncate(decoded.cache, end)
        bench.lm.run([1], end, decoded.cache)

    def reuse() -> None:
        bench.fill_plain_cache()
        bench.plain_reuse()

    return {
        "floor": count(bench.floor),
        "rotate and place": count(bench.place),
        "the same by the kernel": count_kernel(bench),
        "reposition": count(bench.reposition_in_hand),
        "decode a token": count(step),
        "transformers: full caches": count(reuse) - count(bench.fill_plain_cache),
    }


def table(counts: dict[str, Counter[str]], num_layers: int) -> Table:
    made = Table(title=f"calls a layer ({num_layers} layers)")
    made.add_column("operation")
    for name in counts:
        made.add_column(name, justify="right")
    totals = {name: working(calls) for name, calls in counts.items()}
    made.add_row("all that compute or copy", *(f"{total / num_layers:.1f}" for total in totals.values()))
    every: Counter[str] = sum(counts.values(), Counter())
    for name, number in every.most_common():
        if number < num_layers / 10:
            continue
        label = f"{name} (view)" if name in FREE else name
        made.add_row(label, *(f"{calls[name] / num_layers:.1f}" for calls in counts.values()))
    return made


def reads_by_method(built: Built, settings: methods.Settings) -> dict[str, int]:
    """Reads a prompt, by the method's row in `benchmarks.methods`."""
    bench = methods.Bench(built, settings)
    found = {}
    for row, method in bench.methods.items():

        def read(method: FusionMethod = method) -> None:
            bench.fuse(method).cache.release()

        read()
        found[row] = sum(reads_of(read).values())
    return found


def main(arguments: Sequence[str] | None = None) -> dict[str, Counter[str]]:
    parser = argparse.ArgumentParser("benchmarks.ops", description=__doc__)
    parser.add_argument("--out", type=Path, help="where reads.json goes; not written if not given")
    parser.add_argument("--shape", choices=SHAPES, default="SmolLM2-135M")
    parser.add_argument("--dtype", default="float32")
    for name, default in (("passages", 10), ("tokens", 50), ("suffix", 10)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args(sys.argv[1:] if arguments is None else arguments)
    built = build(given.shape, given.dtype)
    with (
        tempfile.TemporaryDirectory() as workdir,
        Bench(built, given.passages, given.tokens, given.suffix, Path(workdir), seed=0) as bench,
    ):
        counts = profile(bench)
    settings = methods.Settings(given.shape, given.dtype, "cpu", given.passages, given.tokens, given.suffix)
    reads = reads_by_method(built, settings)
    console = Console(width=140)
    console.print(table(counts, built.lm.shape.num_layers))
    console.print(reads_table(reads))
    if given.out is not None:
        found = {"shape": given.shape, "layers": built.lm.shape.num_layers, "passages": given.passages, "reads": reads}
        given.out.mkdir(parents=True, exist_ok=True)
        (given.out / "reads.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return counts


def reads_table(reads: Mapping[str, int]) -> Table:
    made = Table(title="reads by the host a prompt")
    made.add_column("method")
    made.add_column("reads", justify="right")
    for row, number in reads.items():
        made.add_row(row, str(number))
    return made


if __name__ == "__main__":
    main()
