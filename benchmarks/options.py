"""Command-line options that the benchmarks share."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.report import RESULTS

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
