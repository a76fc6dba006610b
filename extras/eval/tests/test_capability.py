"""lm-evaluation-harness on a tiny model and local task files, against log-likelihoods by plain transformers."""

import json
from functools import partial

import pytest
import torch
from families import oracle_model

from ragcache.errors import ConfigError
from ragcache_eval.suites.capability import TASKS, measure

pytestmark = pytest.mark.slow  # the harness takes seconds to import

ROWS = [
    {"question": f"What comes after {n}?", "choices": [str(n + 1), "a cat", f"{n} mats"], "gold": n % 3}
    for n in range(8)
]
FILE = """
task: {task}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: gold
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
"""


@pytest.fixture
def tasks(tmp_path, monkeypatch):
    """Task files under the harness's own names, over the rows above; its other 13,000 take a minute to list."""
    manager = pytest.importorskip("lm_eval.tasks", reason="needs ragcache-kv[capability]").TaskManager
    monkeypatch.setattr("lm_eval.tasks.TaskManager", partial(manager, include_defaults=False))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    for task in ("arc_easy", "sciq"):
        (tmp_path / f"{task}.yaml").write_text(FILE.format(task=task, data=data))
    return tmp_path


def likelihood(model, context: list[int], more: list[int]) -> float:
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*context, *more]])).logits[0].log_softmax(-1)
    return float(sum(logits[len(context) + place - 1, id] for place, id in enumerate(more)))


def test_scores_are_those_of_plain_transformers(tasks, tiny, tiny_directory):
    model = oracle_model(str(tiny_directory))

    def ids(text: str) -> list[int]:
        return tiny.tokenizer(text, add_special_tokens=False)["input_ids"]

    right = 0
    for row in ROWS:
        scores = [likelihood(model, ids(row["question"]), ids(f" {choice}")) for choice in row["choices"]]
        right += max(range(3), key=scores.__getitem__) == row["gold"]
    found = measure(["arc_easy", "sciq"], tiny_directory, directory=tasks)
    assert 0 < right < len(ROWS)  # a score that says nothing would show nothing
    assert found["arc_easy"].mean == found["sciq"].mean == pytest.approx(right / len(ROWS))
    assert found["arc_easy"].size == len(ROWS)
    assert found["arc_easy"].low < found["arc_easy"].mean < found["arc_easy"].high
    assert measure(["sciq"], tiny_directory, directory=tasks, limit=3)["sciq"].size == 3


def test_data_that_cannot_be_had_are_named(tasks, tiny_directory):
    (tasks / "rows.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"lm-eval cannot run sciq .*--data-dir"):
        measure(["sciq"], tiny_directory, directory=tasks)


def test_every_column_is_a_task_of_the_harness():
    tasks = pytest.importorskip("lm_eval.tasks", reason="needs ragcache-kv[capability]")
    assert {task.name for task in TASKS.values()} <= set(tasks.TaskManager().all_tasks)
