"""The benchmark `week`: tokens found by kind against plain counts, the replay's figures, and refusals."""

import json
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest

from benchmarks import week
from benchmarks.peer_workers.channel import Answer
from benchmarks.runner import main
from ragcache.errors import ConfigError, TraceError
from ragcache_plan.logs import KINDS, LoggedRequest, Part, read_log


@pytest.fixture
def log(tmp_path) -> Path:
    """Return the path of a log of sixty requests over three days: two system prompts whose last part changes, and
    popular passages.
    """
    random = np.random.default_rng(0)
    lengths = {f"p{number}": int(random.integers(8, 40)) for number in range(30)}
    path = tmp_path / "log.jsonl"
    with path.open("w") as file:
        for number in range(60):
            passages = list(dict.fromkeys(f"p{one}" for one in random.zipf(1.4, 4) % 30))
            parts = {
                "sys_prompt": [[f"s{number % 2}", 20], [f"c{number}", 5]],
                "passages_ids": [[one, lengths[one]] for one in passages],
                "history": [["h", 6]],
                "user_input": [[f"u{number}", 4]],
            }
            line = {"timestamp": number * 3600.0, "input_length": 1, "output_length": 3, "hash_ids": parts}
            file.write(json.dumps(line) + "\n")
    return path


def plain_count(path: Path, room: int) -> tuple[int, int]:
    """Return the passage tokens found by LRU, request by request, and the system prompts' tokens found by an unlimited
    prefix cache.
    """
    held: OrderedDict[str, int] = OrderedDict()
    seen: set[tuple[str, ...]] = set()
    found = system = 0
    for line in path.read_text().splitlines():
        parts = json.loads(line)["hash_ids"]
        missing = {}
        for hash, tokens in parts["passages_ids"]:
            if hash in held:
                held.move_to_end(hash)
                found += tokens
            else:
                missing[hash] = tokens
        for hash, tokens in missing.items():
            held[hash] = tokens
            while sum(held.values()) > room:
                held.popitem(last=False)
        prefix: tuple[str, ...] = ()
        for hash, tokens in parts["sys_prompt"]:
            prefix += (hash,)
            system += tokens if prefix in seen else 0
            seen.add(prefix)
    return found, system


@pytest.mark.parametrize("room", [60, 200, 10_000])
def test_counts_equal_plain_counts(log, room):
    counted = week.Counted(room, "lru", 10**6)
    counted.read(list(read_log(log)), week.REUSED)
    assert (counted.found["passage"], counted.found["system"]) == plain_count(log, room)
    assert counted.found["history"] == counted.found["question"] == 0
    assert counted.asked["history"] == 360
    assert len(counted.periods) == 10


def test_a_prefix_cache_finds_nothing_after_the_first_change(log):
    counted = week.Counted(1, "lru", 10**6)
    counted.read(list(read_log(log)), ())
    assert dict(counted.found) == {"system": 20 * 58}


def test_what_follows_the_passages_is_found_as_a_prefix_alone():
    parts = (Part("system", "s", 20), Part("passage", "p", 30), Part("history", "h", 6), Part("question", "q", 4))
    twice = [LoggedRequest(float(at), parts, 3) for at in range(2)]
    ours, prefixes = (week.Counted(100, "lru", 100) for _ in range(2))
    ours.read(twice, week.REUSED)
    prefixes.read(twice, ())
    assert dict(ours.found) == {"system": 20, "passage": 30}
    assert dict(prefixes.found) == {"system": 20, "passage": 30, "history": 6, "question": 4}


def test_equal_hashes_are_equal_tokens(log):
    settings = week.Settings(log, shape="toy")
    first, second, third = (week.prompt_of(request, settings) for request in list(read_log(log))[:3])
    assert first["passages"][0] == third["passages"][0] != second["passages"][0]
    assert len(first["passages"][0]) == 20
    assert len(first["suffix"]) == 10
    assert list(KINDS.values())[:2] == ["system", "passage"]


def test_a_replay_that_falls_behind_says_by_how_much():
    at, lengths = [0.0, 1.0, 2.0], [10, 10, 10]
    keeps_up = week.replayed([Answer(0.2, 0.5, [1], 5)] * 3, at, lengths)
    assert (keeps_up["behind_s"], keeps_up["found"]) == (0, 0.5)
    late = week.replayed([Answer(0.2, 2.0 + 1.0 * number, [1], 0) for number in range(3)], at, lengths)
    assert late["behind_s"] == pytest.approx(2.0)


@pytest.mark.parametrize("server", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_slice_is_counted_replayed_and_drawn(log, tmp_path, server):
    given = ["--trace", str(log), "--rooms", "100", "200000", "--requests", "4", "--speeds", "36000", "72000"]
    given += ["--shape=toy", "--threads=1", "--kv-mib=64", "--answer=3", "--environments", str(tmp_path)]
    peers = ["ragcache", *["ragcache-server"] * server, "vllm"]
    found = main("week", [*given, "--peers", *peers, "--out", str(tmp_path)]).to_json()
    replay = found["figures"]["replay"]
    assert replay["requests"] == 4
    found = {row: one["speeds"]["72000"]["found"] for row, one in replay["rows"].items()}
    # The part of a system prompt that changes comes after 20 tokens: a cache of prefixes finds no more of any prompt.
    prefixes = 4 * 20 / sum(request.num_tokens for request in list(read_log(log))[:4])
    assert found["ragcache reposition"] > prefixes
    assert set(found.values()) == {found["ragcache reposition"]}
    assert len(found) == 1 + server
    assert all(one["alone_s"]["p95"] > 0 and one["at_twice"] > 0 for one in replay["rows"].values())
    assert "environment was not made" in replay["not_run"]["vllm"]
    page = (tmp_path / "week.md").read_text()
    assert "| vllm | not run" in page
    assert "Seconds to the first token" in page


def test_bad_settings_and_logs_are_named(log, tmp_path):
    for speeds in ((0.0,), (2.0, 1.0)):
        with pytest.raises(ConfigError, match="--speeds are"):
            week.Settings(log, speeds=speeds)
    with pytest.raises(ConfigError, match="no request of at most"):
        week.slice_of(week.Settings(log, start=10**9, requests=1), list(read_log(log)))
    (tmp_path / "cut.jsonl").write_text(log.read_text()[:-30])
    with pytest.raises(TraceError, match=r"cut\.jsonl, line 60: not JSON"):
        main("week", ["--trace", str(tmp_path / "cut.jsonl"), "--out", str(tmp_path)])
