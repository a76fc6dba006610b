"""`ragcache train`: train a model to read passages apart as well as together."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ragcache.cli.flags import Json, hide_bars_in_pipes, option, report_warnings
from ragcache.cli.terminal import command, print_json, say, say_note
from ragcache.errors import ConfigError

if TYPE_CHECKING:
    from ragcache_train.trainer import TrainReport


@dataclass(frozen=True)
class ReuseOptions:
    """Model, data and way of reuse."""

    model: Annotated[str, option("--model", "Model to start from: bundled name, directory, hub id, or an adapter.")]
    out: Annotated[Path, option("--out", "Directory of the trained model, its checkpoints and its log.")]
    data: Annotated[
        list[Path] | None,
        option("--data", "JSON lines (docs/training.md); may be repeated. May be left out with --store."),
    ] = None
    reuse: Annotated[
        Literal["link", "markers"],
        option("--reuse", "KVLink (Block-Attention with --link-tokens 0) or TurboRAG."),
    ] = "link"
    recipe: Annotated[
        Literal["isolated", "prefix", "primer"], option("--recipe", "What passages are read apart behind.")
    ] = "isolated"
    link_tokens: Annotated[int, option("--link-tokens", "K: link tokens after each passage.")] = 5
    link_slots: Annotated[int, option("--link-slots", "Passages that have link tokens of their own.")] = 16
    positions: Annotated[Literal["reordered", "composite"], option("--positions", "Of passages between markers.")] = (
        "reordered"
    )


@dataclass(frozen=True)
class DistillOptions:
    """Learning from a teacher that reads all passages as one text."""

    objective: Annotated[
        Literal["labels", "distill"],
        option("--objective", "Learn the answers, or a frozen teacher's full attention on all behind the passages."),
    ] = "labels"
    teacher: Annotated[
        str | None, option("--teacher", "Of distill: model to learn from; the one to start from if not given.")
    ] = None
    hidden_weight: Annotated[
        float, option("--hidden-weight", "Of distill: weight of the relative error of hidden states.")
    ] = 0.5
    damage_weight: Annotated[
        float,
        option("--damage-weight", "Of distill: additional weight of tokens that reading apart hurts most; 0: none."),
    ] = 0.0
    keep_logits: Annotated[
        Path | None,
        option("--keep-logits", "Of distill: folder of the teacher's likeliest logits, for later epochs and runs."),
    ] = None
    link_rate: Annotated[
        float | None,
        option("--link-rate", "Of distill: learning rate of added tokens; ten times the other if not given."),
    ] = None
    evaluate: Annotated[
        Path | None, option("--evaluate", "Of distill: held-out rows in --data's form, for evaluation.jsonl in --out.")
    ] = None
    evaluate_every: Annotated[int, option("--evaluate-every", "Steps between evaluations.")] = 100
    store: Annotated[
        Path | None,
        typer.Option("--store", help="Of distill: draw rows from this store's passages."),
    ] = None
    database: Annotated[
        str | None,
        typer.Option("--database", help="SQLAlchemy URL of that store's documents."),
    ] = None
    rows: Annotated[int, option("--rows", "Rows drawn from the store.")] = 200
    passages: Annotated[int, option("--passages", "Of distill: passages of a row at most.")] = 8


@dataclass(frozen=True)
class MixtureOptions:
    """How the data is drawn."""

    separate_share: Annotated[
        float, option("--separate-share", "Share of question rows whose passages are encoded separately.")
    ] = 0.5
    mix: Annotated[
        list[str] | None, option("--mix", "Share of a kind of row, as qa=0.4; may be repeated. As in the data if not.")
    ] = None
    keep_order: Annotated[bool, option("--keep-order", "Do not shuffle the passages of question rows.")] = False
    system: Annotated[str | None, option("--system", "System prompt of rows that have none.")] = None
    question_format: Annotated[str | None, option("--question-format", "Text around {question}.")] = None
    segment_tokens: Annotated[int, option("--segment-tokens", "Size of the pieces of a text to be summarised.")] = 100
    max_tokens: Annotated[
        int | None, option("--max-length", "Longest sequence in tokens, link tokens not counted; 4096 if not given.")
    ] = None


@dataclass(frozen=True)
class ScheduleOptions:
    """How long, how fast, and in which batches."""

    epochs: Annotated[float, option("--epochs", "Passes over the data.")] = 1.0
    steps: Annotated[int | None, option("--steps", "Steps of the optimizer, in place of --epochs.")] = None
    minutes: Annotated[
        float | None, option("--minutes", "End after so many; the learning rate falls with the time then.")
    ] = None
    batch_tokens: Annotated[int, option("--batch-tokens", "Tokens of a batch at most.")] = 8192
    batch_size: Annotated[int | None, option("--batch-size", "Rows of a batch at most.")] = None
    accumulate: Annotated[int, option("--accumulate", "Batches of one step.")] = 1
    learning_rate: Annotated[
        float | None, option("--learning-rate", "1e-5 if not given, 1e-4 with distill, 2e-4 with LoRA.")
    ] = None
    warmup: Annotated[float, option("--warmup", "Share of the steps over which the learning rate rises.")] = 0.03
    lora_rank: Annotated[int, option("--lora-rank", "Rank of LoRA's matrices; 0 trains all weights.")] = 0
    lora_alpha: Annotated[float | None, option("--lora-alpha", "Scale of LoRA; twice the rank if not given.")] = None
    lora_on: Annotated[
        Literal["all", "passages"] | None,
        option("--lora-on", "Tokens that LoRA acts on; with distill passages', all others if not given."),
    ] = None
    merge: Annotated[bool, option("--merge", "With LoRA: write the whole model, in place of an adapter.")] = False
    checkpointing: Annotated[bool, option("--checkpointing", "Compute activations twice to save memory.")] = False
    seed: Annotated[int, option("--seed", "Of new rows, order and batches.")] = 0


@dataclass(frozen=True)
class RunOptions:
    """Device of the run, and the files that it writes on the way."""

    device: Annotated[str, option("--device", "auto, cuda, xpu, mps or cpu.")] = "auto"
    dtype: Annotated[str, option("--dtype", "Of the weights while training.")] = "float32"
    precision: Annotated[
        Literal["float32", "bfloat16"] | None,
        option("--precision", "Of the passes; bfloat16 on a GPU, else float32, if not given."),
    ] = None
    compile: Annotated[
        bool | None, option("--compile/--no-compile", "Compile the model's layers; on a GPU, if not given.")
    ] = None
    save_dtype: Annotated[str | None, option("--save-dtype", "Of the saved weights; as before if not given.")] = None
    save_every: Annotated[int, option("--save-every", "Steps between checkpoints.")] = 500
    keep_checkpoints: Annotated[int, option("--keep-checkpoints", "Checkpoints that are kept.")] = 2
    log_every: Annotated[int, option("--log-every", "Steps between lines of the log.")] = 10
    resume: Annotated[bool, option("--resume", "Go on from the last checkpoint in --out.")] = False


@command
def train(
    reuse: ReuseOptions,
    distill: DistillOptions,
    mixture: MixtureOptions,
    schedule: ScheduleOptions,
    run: RunOptions,
    as_json: Json = False,
) -> None:
    """Train a model for reuse: passages read apart, joined by link tokens, markers or nothing.

    The result is a Hugging Face directory, or with --lora-rank an adapter, that every command takes as
    --model.
    """
    try:
        from ragcache_train.train_options import TrainOptions
        from ragcache_train.trainer import train as run_training
    except ImportError as error:
        raise ConfigError(f"training needs {error.name}; install ragcache-kv[train]") from error
    report_warnings()
    hide_bars_in_pipes()
    groups = (reuse, distill, mixture, schedule, run)
    given: dict[str, Any] = {name: value for group in groups for name, value in vars(group).items()}
    given["data"] = tuple(reuse.data or ())
    given["mixture"] = _mixture(given.pop("mix"))
    given["shuffle_passages"] = not given.pop("keep_order")
    report = run_training(TrainOptions(**given), show=None if as_json else _say_progress)
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
        ("last loss", "-" if report.loss is None else f"{report.loss:.4f}"),
    ]
    for name, value in rows:
        say(f"{name:<12}{value}")


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
