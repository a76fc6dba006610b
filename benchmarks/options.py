"""Command-line options that the benchmarks share."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from benchmarks.report import RESULTS, Result, show, write

S = TypeVar("S")


def add_numbers(parser: argparse.ArgumentParser, default: Any, names: Sequence[str]) -> None:
    """One integer option a name, with the settings' own default."""
    for name in names:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(default, name))


def add_places(parser: argparse.ArgumentParser, workdir: str | None) -> None:
    """--out, and --workdir with its help text where the benchmark writes a store."""
    if workdir is not None:
        parser.add_argument("--workdir", type=Path, help=workdir)
    parser.add_argument("--out", type=Path, default=RESULTS)


def settings_from(given: argparse.Namespace, settings: type[S]) -> S:
    """The fields of a settings dataclass, out of parsed arguments of the same names."""
    names = settings.__dataclass_fields__  # type: ignore[attr-defined]
    return settings(**{name: getattr(given, name) for name in names})


def measure_and_report(
    measure: Callable[[S, Sequence[str]], Result], settings: S, threads: int, out: Path, given: Sequence[str]
) -> Result:
    """Measure with so many threads (0: as torch chooses), write the result to `out` and show it. given: arguments"""
    if threads:
        torch.set_num_threads(threads)
    result = measure(settings, given)
    write(result, out)
    show(result)
    return result
