"""The census against a brute-force count over whole prompts, on logs as their programs write them."""

import json
from collections import Counter
from itertools import takewhile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ragpulse import write_ragpulse
from terminal import invoke

from ragcache.errors import ConfigError, TraceError
from ragcache_plan.census import SHARES, Census, pieces_of
from ragcache_plan.request_logs import Logged, read_log

blocks = st.lists(st.lists(st.integers(0, 6), max_size=9), max_size=8)


def counted(prompts) -> Counter:
    """Return the shares, by comparing every prompt with all earlier prompts, piece by piece."""
    found = Counter()
    for number, prompt in enumerate(prompts):
        earlier = prompts[:number]
        prefix = max((sum(1 for _ in takewhile(bool, map(int.__eq__, prompt, one))) for one in earlier), default=0)
        seen = [rank < prefix or any(piece in one for one in earlier) for rank, piece in enumerate(prompt)]
        for rank, known in enumerate(seen):
            between = any(seen[:rank]) and any(seen[rank + 1 :])
            found["prefix" if rank < prefix else "moved" if known else "changed" if between else "new"] += 1
    return found


@settings(max_examples=200, deadline=None)
@given(blocks)
def test_shares_are_those_of_a_count_by_hand(prompts):
    census = Census()
    for prompt in prompts:
        census.add(Logged(prompt, "day 1", "trace"))
    assert census.tokens == counted(prompts)
    assert sum(census.by_day["day 1"].values()) == sum(map(len, prompts))


def words(start: int, count: int) -> str:
    return " ".join(f"word{number}" for number in range(start, start + count))


def test_an_edit_changes_little_and_moves_nothing_away():
    rules, notes = words(0, 2000), words(5000, 2000)
    census = Census()
    for date in ("Monday", "Tuesday"):
        census.add(Logged([f"Today is {date}. {rules}", notes], "unknown", "question"))
    assert sum(census.tokens.values()) == 2 * (4000 + 4)
    assert census.tokens["new"] == 4004 + sum(
        size for _, size in list(pieces_of(Logged([f"Today is Tuesday. {rules}"], "", "")))[:1]
    )
    assert census.tokens["moved"] > 3850, "a date at the beginning moves everything after it"
    assert census.tokens["prefix"] == 0
    census.add(Logged([f"Today is Tuesday. {rules}", "Now", notes], "unknown", "question"))
    assert census.tokens["changed"] == 1


def test_pieces_beyond_the_window_are_new_again():
    census = Census(most=4)
    for prompt in ([1, 2], [3, 4, 5, 6], [1, 2]):
        census.add(Logged(prompt, "", ""))
    assert census.tokens == {"new": 8}


MESSAGES = [{"role": "user", "content": "Who sits on the mat?"}]
LOGS = {
    "openai": {"messages": MESSAGES, "timestamp": "2026-03-01T10:00:00Z"},
    "batch": {"custom_id": "1", "body": {"messages": MESSAGES}, "created": 1772359200},
    "litellm": {"messages": json.dumps(MESSAGES), "startTime": "2026-03-01 10:00:00", "call_type": "acompletion"},
    "mooncake": {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47]},
    "record": {"timestamp": 1772359200.5, "input_length": 9, "hash_ids": {"sys_prompt": [["5f", 7]], "history": []}},
    "ragpulse": {"timestamp": "90000", "input_length": 90, "hash_ids": {"sys_prompt": ["a"], "passages": ["b", "c"]}},
}


def test_every_programs_log_is_read(tmp_path):
    path, skipped = tmp_path / "log.jsonl", Counter()
    vllm = "INFO 03-01 10:00:00 Received request cmpl-1: prompt: 'It\\'s a \\n mat', params: SamplingParams()"
    path.write_text(
        "\n".join([*map(json.dumps, LOGS.values()), vllm, '{"messages": [{"ro', "Started server", '{"a": 1}', ""])
    )
    found = list(read_log(path, skipped))
    assert [one.day for one in found] == ["2026-03-01"] * 3 + ["day 1", "2026-03-01", "day 2", "03-01"]
    assert [one.kind for one in found] == ["question"] * 3 + ["trace"] * 3 + ["prompt"]
    assert [[tokens for _, tokens in one.parts] for one in found[3:6]] == [[512] * 2, [7], [30] * 3]
    assert found[-1].parts == ["It's a \n mat"]
    assert sorted(skipped.values()) == [1, 1, 1]


@pytest.mark.parametrize("end", ["", ".gz"])
def test_a_directory_of_ragpulse_has_the_lengths_of_its_tables(tmp_path, end):
    requests = [{"sys_prompt": [1], "passages_ids": [5, 6]}, {"sys_prompt": [1], "passages_ids": [6], "history": [3]}]
    write_ragpulse(tmp_path, requests, {1: 10, 5: 20, 6: 30, 3: 7}, end)
    census = Census()
    for request in read_log(tmp_path, census.skipped):
        census.add(request)
    assert census.tokens == {"new": 67, "prefix": 10, "moved": 30}
    assert list(census.by_day) == ["day 1"]


def test_a_directory_without_traces_is_refused(tmp_path):
    with pytest.raises(TraceError, match="RAGPulse"):
        list(read_log(tmp_path, Counter()))


def test_an_open_webui_export_is_a_request_for_each_answer(tmp_path):
    talk = [{"role": role, "content": role} for role in ("user", "assistant", "user", "assistant")]
    path = tmp_path / "export.json"
    path.write_text(json.dumps([{"title": "t", "created_at": 1772359200, "chat": {"messages": talk}}]))
    found = list(read_log(path, Counter()))
    assert [(len(one.parts), one.kind) for one in found] == [(1, "question"), (3, "conversation")]


@pytest.mark.parametrize("text", ["[{", "[1"])
def test_a_broken_export_is_refused_by_name(tmp_path, text):
    path = tmp_path / "export.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"export\.json"):
        list(read_log(path, Counter()))


def test_the_command_sums_to_100(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps(LOGS["openai"]) + "\n" for _ in range(4)))
    found = invoke("census", str(path), "--prefill-rate", "10", "--json")
    assert found.exit_code == 0, found.output
    told = json.loads(found.stdout)
    assert told["shares"] == {**dict.fromkeys(SHARES, 0.0), "prefix": 75.0, "new": 25.0}
    assert told["prefix_saves_s"] == pytest.approx(told["tokens"] * 0.75 / 10)
    empty = invoke("census", str(tmp_path / "none"))
    assert empty.exit_code != 0
