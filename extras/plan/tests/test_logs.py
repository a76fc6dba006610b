"""Logs of requests in all formats, against the tables that they were written from, and bad lines."""

import json
from collections import OrderedDict

import numpy as np
import pytest
from ragpulse import write_ragpulse

from ragcache.errors import TraceError
from ragcache_plan.accesses import recorded
from ragcache_plan.logs import read_log
from ragcache_plan.rates import MachineRates
from ragcache_plan.replay import Budgets, replay

LINE = {
    "timestamp": "5",
    "input_length": 9,
    "output_length": 3,
    "hash_ids": {"sys_prompt": [["a", 2]], "passages_ids": [["p", 4], ["q", 5]], "user_input": [["u", 1]]},
    "session_id": "s",
}
MOONCAKE = {"timestamp": 1500, "input_length": 600, "output_length": 3, "hash_ids": [7, 8]}


@pytest.mark.parametrize("end", ["", ".gz"])
def test_ragpulse_is_read_with_its_tables(tmp_path, end):
    requests = [{"sys_prompt": [1], "passages_ids": [5, 6], "user_input": [9]}, {"sys_prompt": [1], "history": [3]}]
    write_ragpulse(tmp_path, requests, {1: 10, 5: 20, 6: 30, 9: 4, 3: 7}, end)
    first, second = read_log(tmp_path)
    assert [(part.kind, part.hash, part.num_tokens) for part in first.parts] == [
        ("system", "1", 10), ("passage", "5", 20), ("passage", "6", 30), ("question", "9", 4)
    ]  # fmt: skip
    assert (second.at, second.num_tokens, second.output_tokens, second.session) == (1.0, 17, 2, "x")


def test_two_weeks_by_one_clock_are_laid_upon_one_another(tmp_path):
    write_ragpulse(tmp_path, [{"passages_ids": [hash]} for hash in (1, 2, 3)], {1: 5, 2: 5, 3: 5}, "")
    lines = (tmp_path / "0_trace.jsonl").read_text().splitlines()
    (tmp_path / "0_trace.jsonl").write_text("\n".join([*lines[1:], lines[0]]))
    assert [request.parts[0].hash for request in read_log(tmp_path)] == ["1", "2", "3"]


def test_a_logs_passages_are_accesses(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text(json.dumps(LINE) + "\n" + json.dumps(LINE | {"hash_ids": {"passages_ids": [["q", 5]]}}) + "\n")
    trace = recorded(path, bytes_per_token=3)
    assert (trace.blocks.tolist(), trace.starts.tolist()) == ([0, 1, 1], [0, 2, 3])
    assert (trace.num_bytes.tolist(), trace.num_tokens.tolist()) == ([12, 15], [4, 5])
    assert (trace.total_tokens, trace.room(6)) == (14, 18)


def test_mooncakes_blocks_are_accesses(tmp_path):
    path = tmp_path / "mooncake.jsonl"
    path.write_text(json.dumps(MOONCAKE) + "\n" + json.dumps(MOONCAKE | {"hash_ids": [7], "input_length": 512}) + "\n")
    trace = recorded(path)
    assert (trace.blocks.tolist(), trace.num_tokens.tolist()) == ([0, 1, 0], [512, 88])
    assert next(read_log(path)).at == 1.5


@pytest.mark.parametrize("budget", [30, 100, 400])
def test_lru_finds_the_tokens_that_a_plain_count_finds(tmp_path, budget):
    random = np.random.default_rng(2)
    lengths = {hash: int(random.integers(3, 30)) for hash in range(40)}
    requests = [{"passages_ids": [int(hash)]} for hash in random.zipf(1.3, 400) % 40]
    write_ragpulse(tmp_path, requests, lengths, "")
    held: OrderedDict[int, int] = OrderedDict()
    found = 0
    for request in requests:
        (hash,) = request["passages_ids"]
        found += held.pop(hash, 0)
        held[hash] = lengths[hash]
        while sum(held.values()) > budget:
            held.popitem(last=False)
    trace = recorded(tmp_path, bytes_per_token=1)
    done = replay(trace, Budgets(budget, 0, eager=False), "lru", "all", MachineRates())
    assert done.hit_tokens["memory"] == found


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (json.dumps(LINE)[:50].encode(), "not JSON"),
        (b"{", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", "not a JSON object"),
        (b"[1]", "not a JSON object"),
        (b"\xff\xfe\x00", "not UTF-8"),
        (LINE | {"timestamp": "4"}, "4 s, and 5 s in the line before"),
        (LINE | {"timestamp": "noon"}, "'timestamp' is 'noon'"),
        (LINE | {"timestamp": "nan"}, "'timestamp' is 'nan'"),
        (LINE | {"output_length": 0}, "'output_length' is 0"),
        (LINE | {"hash_ids": {"passages_ids": [["p", 0]]}}, "'the length' is 0"),
        (LINE | {"hash_ids": {"passages_ids": [["p", 1 << 30]]}}, "from 1 to"),
        (LINE | {"hash_ids": {"passages_ids": [["p", 6]]}}, "hash p has 6 tokens here, 4 before"),
        (LINE | {"hash_ids": {"passages_ids": [17]}}, "not a hash and its length"),
        (LINE | {"hash_ids": {}}, "its prompt has no parts"),
        (LINE | {"hash_ids": "p"}, "'hash_ids' is neither"),
        (MOONCAKE | {"timestamp": 9000, "hash_ids": [7]}, "1 hashes for 600 tokens"),
        (MOONCAKE | {"timestamp": 9000, "input_length": 0}, "'input_length' is 0"),
        (MOONCAKE | {"timestamp": 9000, "hash_ids": ["x", "p"]}, "hash p has 88 tokens here, 4 before"),
    ],
)
def test_a_bad_line_of_a_log_is_named(tmp_path, line, reason):
    path = tmp_path / "log.jsonl"
    content = line if isinstance(line, bytes) else json.dumps(line).encode()
    path.write_bytes(b"%b\n\n%b\n" % (json.dumps(LINE).encode(), content))
    with pytest.raises(TraceError, match=r"log\.jsonl, line 3: ") as caught:
        list(read_log(path))
    assert (caught.value.path, caught.value.line) == (str(path), 3)
    assert reason in caught.value.reason


@pytest.mark.parametrize(
    ("file", "lines", "reason"),
    [
        (
            "2_passages",
            ['{"passage_id": 1, "token_length": 3}', '{"passage_id": 1, "token_length": 4}'],
            "hash 1 has 4",
        ),
        ("2_passages", ['{"passage_id": 1, "token_length": 3}', '{"passage_id": 2, "token_length": 0}'], "is 0"),
        ("3_history", ['{"history_id": 7, "token_length": 3}', '{"token_length": 3}'], "no hash"),
    ],
)
def test_a_bad_line_of_a_table_is_named(tmp_path, file, lines, reason):
    write_ragpulse(tmp_path, [{"passages_ids": [1]}], {1: 3}, "")
    (tmp_path / f"{file}.jsonl").write_text("\n".join(lines))
    with pytest.raises(TraceError, match=rf"{file}\.jsonl, line 2: ") as caught:
        list(read_log(tmp_path))
    assert reason in caught.value.reason


def test_a_file_that_cannot_be_opened_or_is_empty_is_named(tmp_path):
    with pytest.raises(TraceError, match="cannot be read"):
        list(read_log(tmp_path / "absent"))
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(TraceError, match=r"empty\.jsonl: there is no access"):
        recorded(tmp_path / "empty.jsonl")


def test_a_directory_without_a_table_is_refused(tmp_path):
    write_ragpulse(tmp_path, [{"passages_ids": [1]}], {1: 3}, "")
    (tmp_path / "3_history.jsonl").unlink()
    with pytest.raises(TraceError, match=r"no 3_history\.jsonl"):
        read_log(tmp_path)


def test_a_compressed_file_that_is_cut_is_named(tmp_path):
    write_ragpulse(tmp_path, [{"passages_ids": [1]}] * 500, {1: 3}, ".gz")
    path = tmp_path / "0_trace.jsonl.gz"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(TraceError, match=r"0_trace\.jsonl\.gz, line \d+: cannot be read"):
        list(read_log(tmp_path))
