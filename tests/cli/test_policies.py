"""--eviction, --admission and --trace, from the command line to the tier."""

from __future__ import annotations

import json

import pytest
from terminal import invoke

from ragcache_plan.accesses import read_trace


@pytest.mark.parametrize("eviction", ["lfu", "gdsf", "pgdsf"])
def test_answers_are_the_same_under_every_policy(store, eviction, tmp_path):
    arguments = ["ask", "Where is the cat?", "--store", store, "--method", "reposition", "--max-tokens", 4, "--json"]
    plain = json.loads(invoke(*arguments).stdout)
    trace = tmp_path / "trace.jsonl"
    result = invoke(*arguments, "--eviction", eviction, "--admission", "tinylfu", "--memory", "64KiB", "--trace", trace)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["text"], found["hits"]) == (plain["text"], plain["hits"])
    accesses = list(read_trace(trace))
    assert [(a.handle, a.num_tokens, a.tier) for a in accesses] == [
        (hit["handle"], hit["tokens"], hit["kv"]) for hit in found["hits"]
    ]
    assert len({access.request for access in accesses}) == 1
    assert "cat" not in trace.read_text()


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [("--eviction", "random", "lfu, lru, pgdsf"), ("--admission", "bouncer", "all, tinylfu")],
)
def test_unknown_names_are_refused(store, option, value, message):
    result = invoke("info", "--store", store, option, value)
    assert result.exit_code == 2
    assert message in result.stderr


def test_a_trace_that_cannot_be_written_is_refused(store, tmp_path):
    result = invoke("info", "--store", store, "--trace", tmp_path / "no" / "where")
    assert result.exit_code == 1
    assert "cannot be written" in result.stderr
