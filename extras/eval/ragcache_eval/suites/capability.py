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
from ragcache_eval.suites.base import Column, Suite
from ragcache_eval.suites.rows import UNREADABLE


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
