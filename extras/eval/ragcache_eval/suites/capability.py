"""KVLink's check that training for reuse leaves a model's abilities as they are (arXiv 2502.16002, table 2).

EleutherAI's lm-evaluation-harness asks, under ordinary decoding, as in the paper (A.2: 8 shots for GSM8K, 5 for MMLU).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ragcache.errors import ConfigError
from ragcache.models.load import base_of
from ragcache.models.machine import find_device
from ragcache_eval.intervals import Estimate, Z
from ragcache_eval.suites.base import Column, PaperRow, Suite
from ragcache_eval.suites.rows import UNREADABLE

SMALL, MIDDLE, LARGE = "Llama-3.2-1B", "Llama-3.2-3B", "Llama-3.1-8B"


class Task(NamedTuple):
    """name: the harness's; metric: its name for the score; shots: None for the task's default"""

    name: str
    metric: str
    shots: int | None = None


TASKS = {
    "gsm8k": Task("gsm8k", "exact_match,strict-match", 8),
    "mmlu": Task("mmlu", "acc,none", 5),
    "ifeval_instructions": Task("ifeval", "inst_level_strict_acc,none"),
    "ifeval_prompts": Task("ifeval", "prompt_level_strict_acc,none"),
    "arc_easy": Task("arc_easy", "acc,none"),
    "arc_challenge": Task("arc_challenge", "acc,none"),
    "piqa": Task("piqa", "acc,none"),
    "sciq": Task("sciq", "acc,none"),
    "winogrande": Task("winogrande", "acc,none"),
    "hellaswag": Task("hellaswag", "acc,none"),
}

CAPABILITY = Suite(
    "capability",
    "table 2 of arXiv 2502.16002",
    (
        Column("gsm8k", "GSM8K"),
        Column("mmlu", "MMLU"),
        Column("ifeval_instructions", "IFEval-I"),
        Column("ifeval_prompts", "IFEval-P"),
        Column("arc_easy", "ARC-E"),
        Column("arc_challenge", "ARC-C"),
        Column("piqa", "PiQA"),
        Column("sciq", "SciQ"),
        Column("winogrande", "WG"),
        Column("hellaswag", "HS"),
    ),
    rows=(
        PaperRow(SMALL, "Original Llama", (44.9, 46.1, 65.9, 54.5, 68.5, 35.8, 74.3, 93.9, 59.5, 45.2)),
        PaperRow(SMALL, "Finetuned Llama", (39.7, 43.2, 64.0, 50.8, 68.5, 35.0, 74.6, 94.1, 59.7, 45.2)),
        PaperRow(SMALL, "KVLink 0", (41.1, 42.0, 63.2, 50.1, 67.2, 33.5, 74.1, 93.5, 57.5, 43.7)),
        PaperRow(SMALL, "KVLink 1", (41.2, 42.2, 64.4, 51.2, 67.2, 33.4, 73.8, 93.5, 57.5, 43.7)),
        PaperRow(SMALL, "KVLink 5", (41.0, 42.3, 64.3, 51.4, 67.0, 33.4, 73.8, 93.6, 57.6, 43.6)),
        PaperRow(MIDDLE, "Original Llama", (77.2, 60.5, 82.2, 75.6, 74.2, 43.7, 75.7, 95.2, 67.4, 52.2)),
        PaperRow(MIDDLE, "Finetuned Llama", (70.0, 60.5, 78.4, 69.9, 72.3, 40.3, 76.2, 96.0, 66.8, 51.6)),
        PaperRow(MIDDLE, "KVLink 0", (70.2, 60.7, 79.4, 70.8, 72.7, 40.4, 76.0, 95.5, 65.7, 51.4)),
        PaperRow(MIDDLE, "KVLink 1", (70.8, 60.9, 79.4, 70.4, 72.3, 40.0, 76.0, 95.6, 65.5, 51.4)),
        PaperRow(MIDDLE, "KVLink 5", (70.5, 60.9, 79.4, 70.4, 72.6, 40.0, 76.0, 95.6, 65.5, 51.4)),
        PaperRow(LARGE, "Original Llama", (85.1, 68.0, 85.1, 78.7, 81.9, 51.7, 79.8, 96.7, 73.7, 59.1)),
        PaperRow(LARGE, "Finetuned Llama", (75.4, 64.3, 82.7, 75.6, 80.9, 48.3, 80.3, 96.3, 72.9, 58.6)),
        PaperRow(LARGE, "KVLink 0", (75.2, 64.8, 82.8, 75.8, 82.1, 50.8, 80.0, 96.8, 72.5, 58.9)),
        PaperRow(LARGE, "KVLink 1", (75.5, 64.0, 82.4, 75.4, 82.2, 51.1, 80.7, 96.8, 72.8, 59.0)),
        PaperRow(LARGE, "KVLink 5", (75.7, 64.0, 83.0, 76.2, 81.5, 50.4, 80.3, 96.6, 72.4, 59.1)),
    ),
    names={"full": ("Original Llama", "Finetuned Llama", "KVLink 0", "KVLink 1", "KVLink 5")},
    note="Accuracies of the harness's own prompts, not normalised for length; GSM8K by its strict match.",
)


def measure(
    names: Sequence[str],
    model: str | Path,
    *,
    dtype: str = "float32",
    device: str = "auto",
    limit: int | None = None,
    directory: Path | None = None,
) -> dict[str, Estimate]:
    """Return the scores of these columns.

    model:     bundled name, directory or hub id. For an adapter the base is measured: the adapter does not change it
    limit:     questions a task (of MMLU, a subject)
    directory: of task files in YAML that replace the harness's files of the same name, to name local data

    Raises ConfigError if lm-eval is not installed or a task's data is unavailable.
    """
    chosen, known = {name: TASKS[name] for name in names}, _known_tasks(directory)
    shots = dict.fromkeys(task.shots for task in chosen.values())
    found: dict[str, Any] = {}
    sizes: dict[str, int] = {}
    for count in shots:
        tasks = list(dict.fromkeys(task.name for task in chosen.values() if task.shots == count))
        done = _evaluate(tasks, known, str(model), dtype, device, count, limit)
        found |= done["results"]
        sizes |= {name: int(size["effective"]) for name, size in done["n-samples"].items()}
    return {name: _estimate(found[task.name], task, sizes) for name, task in chosen.items()}


def _known_tasks(directory: Path | None) -> Any:
    """Return the harness's index of its task files, which takes it many seconds to make."""
    try:
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise ConfigError("suite capability needs lm-eval; pip install 'ragcache-kv[capability]'") from error
    return TaskManager(include_path=None if directory is None else str(directory))


def _evaluate(
    tasks: list[str], known: Any, model: str, dtype: str, device: str, shots: int | None, limit: int | None
) -> dict[str, Any]:
    from lm_eval import simple_evaluate

    try:
        done: dict[str, Any] = simple_evaluate(
            model="hf",
            model_args={"pretrained": base_of(model), "dtype": dtype},
            tasks=tasks,
            num_fewshot=shots,
            device=str(find_device(device)),
            limit=limit,
            log_samples=False,
            task_manager=known,
        )
    except UNREADABLE as error:
        raise ConfigError(
            f"lm-eval cannot run {', '.join(tasks)} ({error}); it fetches data from the hub: run it where that can be "
            "reached, or name a directory (--data-dir) with a file TASK.yaml for each that points at your copy"
        ) from error
    return done


def _estimate(found: dict[str, Any], task: Task, sizes: dict[str, int]) -> Estimate:
    """Return the harness's score with its standard error as an interval; tasks of a group are counted together."""
    mean = float(found[task.metric])
    metric, _, rule = task.metric.partition(",")
    error = found.get(f"{metric}_stderr,{rule}")
    half = Z * error if isinstance(error, float) else 0.0
    size = sum(size for name, size in sizes.items() if name == task.name or name.startswith(f"{task.name}_"))
    return Estimate(mean, mean - half, mean + half, size)
