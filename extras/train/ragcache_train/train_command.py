"""`ragcache train`: train a model to read passages apart as well as together."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ragcache.cli.flags import Json, hide_bars_in_pipes, option, report_warnings
from ragcache.cli.terminal import command, print_json, print_rows, say_note
from ragcache.errors import ConfigError
from ragcache_train.train_options import TrainOptions

if TYPE_CHECKING:
    from ragcache_train.trainer import TrainReport


@command
def train(
    options: TrainOptions,
    data: Annotated[
        list[Path] | None,
        option("--data", "JSON lines (docs/training.md); may be repeated. May be left out with --store."),
    ] = None,
    mix: Annotated[
        list[str] | None,
        option("--mix", "Share of a kind of row, as qa=0.4; may be repeated. As in the data if not given."),
    ] = None,
    keep_order: Annotated[bool, option("--keep-order", "Do not shuffle the passages of question rows.")] = False,
    as_json: Json = False,
) -> None:
    """Train a model for reuse: passages read apart, joined by link tokens, markers or nothing.

    The result is a Hugging Face directory, or with --lora-rank an adapter, that every command takes as
    --model.
    """
    try:
        from ragcache_train.trainer import train as run_training
    except ImportError as error:
        raise ConfigError(f"training needs {error.name}; install ragcache-kv[train]") from error
    report_warnings()
    hide_bars_in_pipes()
    options = replace(options, data=tuple(data or ()), mixture=_mixture(mix), shuffle_passages=not keep_order)
    report = run_training(options, show=None if as_json else _say_progress)
    if as_json:
        print_json(report.to_json())
    else:
        _print_report(report)


def _say_progress(line: dict[str, Any]) -> None:
    say_note(f"step {line['step']} of {line['steps']}   loss {line['loss']:.4f}   {line['seconds']:.0f} s")


def _print_report(report: TrainReport) -> None:
    rows = [
        ("model", report.out),
        ("rows", f"{report.rows} used, {len(report.bad)} left out"),
        ("steps", report.steps),
        ("tokens", f"{report.tokens:,}"),
        ("last loss", None if report.loss is None else f"{report.loss:.4f}"),
    ]
    print_rows(rows, 12)


def _mixture(shares: list[str] | None) -> dict[str, float] | None:
    if not shares:
        return None
    found = {}
    for text in shares:
        kind, _, share = text.partition("=")
        try:
            found[kind.strip()] = float(share)
        except ValueError as error:
            raise typer.BadParameter(f"{text!r} is not a share; write it like qa=0.4") from error
    return found
