"""`ragcache plan` and `ragcache simulate` print the library's figures, and refuse bad options."""

import json

import pytest
from terminal import invoke

from ragcache.codecs import CODECS
from ragcache.store.eviction import ADMISSIONS, POLICIES
from ragcache_plan.accesses import recorded
from ragcache_plan.demand import Demand, Prices
from ragcache_plan.plan import Corpus, make_plan
from ragcache_plan.rates import MachineRates
from ragcache_plan.replay import Budgets
from ragcache_plan.shape import KVShape
from ragcache_plan.simulation import simulate
from ragcache_plan.stated import shape_of

SHAPE = ["--layers", 32, "--kv-heads", 8, "--head-dim", 128]
CORPUS = ["--documents", 100, "--tokens", 1000]
TRACE = [[["one", 16], ["two", 8]], [["one", 16], ["three", 4]]]


def test_plan_is_the_librarys():
    result = invoke(
        "plan", *SHAPE, *CORPUS, "--requests", 10**6, "--request-tokens", 5000, "--tier", "memory", "--zipf", 0.5,
        "--gpu-hour", 2, "--gb-month", 0.1, "--months", 3, "--prefill-rate", 4000, "--memory-rate", 2e10, "--json",
        "--network-rate", 1e9, "--replicas", 3, "--gb-transfer", 0.01, "--kv-kept", 0.5,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    expected = make_plan(
        KVShape(32, 8, 128),
        Corpus(100, 1000, kept=0.5),
        Demand(10**6, 5000, zipf=0.5, tier="memory", replicas=3),
        MachineRates(4000.0, memory_bytes_s=2e10, network_bytes_s=1e9),
        Prices(2.0, 0.1, 3.0, 0.01),
    ).to_json()
    assert found == json.loads(json.dumps(expected))
    assert found["bytes_per_token"] == 131072


def test_plan_in_words():
    result = invoke("plan", "--model", "mini", *CORPUS, "--requests", 1000)
    assert result.exit_code == 0, result.output
    assert f"{shape_of('mini').bytes_per_token:,} bytes a token" in result.stdout
    assert "1,000 requests a month" in result.stdout
    rows = [line.split()[0] for line in result.stdout.splitlines() if line]
    assert set(CODECS) <= set(rows)
    assert "- keep KV of all chunks" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["plan", *SHAPE, *CORPUS, "--kv-kept", 1.5], 2, "--kv-kept is 1.5"),
        (["plan", *SHAPE, *CORPUS, "--measure"], 2, "--measure runs the model"),
        (["plan", *SHAPE[:4], *CORPUS], 2, "--head-dim is missing"),
        (["plan", *SHAPE, *CORPUS, "--model", "mini"], 2, "give one of them"),
        (["plan", "--model", "/no/such/model", *CORPUS], 1, "/no/such/model"),
        (["plan", *SHAPE, "--tokens", 5], 2, "--documents is missing"),
        (["plan", *SHAPE, "--documents", 5], 2, "--tokens is missing"),
        (["plan", *SHAPE, "--trace", "/no/such/log"], 1, "/no/such/log: cannot be read"),
        (["simulate", "trace.jsonl", "--eviction", "random"], 2, "'random' is unknown"),
        (["simulate", "trace.jsonl", "--admission", "bouncer"], 2, "'bouncer' is unknown"),
        (["simulate", "trace.jsonl", "--memory", "1"], 2, "holds no block"),
        (["simulate", "trace.jsonl", "--memory", "1MiB", "--room", 9], 2, "give one of them"),
        (["simulate", "trace.jsonl", "--question-tokens", -1], 2, "--question-tokens is -1"),
        (["simulate", "/no/such/trace"], 1, "/no/such/trace: cannot be read"),
        (["simulate", "bad.jsonl"], 1, "bad.jsonl, line 1: 'timestamp' is None"),
    ],
)
def test_refusals_are_one_line(arguments, status, message, trace, monkeypatch):
    monkeypatch.chdir(trace.parent)
    (trace.parent / "bad.jsonl").write_text('{"at": 1}\n')
    result = invoke(*arguments)
    assert result.exit_code == status, result.output
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert message in result.stderr


def test_plan_sizes_a_log(tmp_path):
    """Of four passages of 100 tokens, the first two are requested every hour and the others once."""
    path = tmp_path / "log.jsonl"
    with path.open("w") as file:
        for hour in range(10):
            passages = [["a", 100], ["b", 100], *([["c", 100], ["d", 100]] if hour == 4 else [])]
            parts = {"passages_ids": passages, "user_input": [[f"q{hour}", 50]]}
            line = {"timestamp": 3600 * hour, "input_length": 1, "output_length": 9, "hash_ids": parts}
            file.write(json.dumps(line) + "\n")
    found = json.loads(invoke("plan", *SHAPE, "--trace", path, "--prefill-rate", 0.1, "--json").stdout)
    assert (found["requests"], found["span_s"], found["passages"]) == (10, 32400.0, 4)
    assert (found["prompt_tokens"], found["passage_tokens"], found["disk_tokens"]) == (2700, 2200, 400)
    assert found["disk_bytes"] == 400 * 131072
    sizes = {size["tokens"]: size for size in found["sizes"]}
    assert list(sizes) == [25, 50, 100, 200, 400]
    assert sizes[25]["token_rate"] == 0
    assert sizes[400]["token_rate"] == pytest.approx(18 / 22)
    assert sizes[400]["computed_rate"] == pytest.approx(900 / 2700)
    assert found["memory"] == next(size for size in found["sizes"] if size["token_rate"] >= 0.95 * 18 / 22)
    assert found["cards_without"] == 2, "450 tokens of the fifth hour at 0.1 a second are 1.25 hours"
    assert sizes[400]["cards"] == 1
    text = invoke("plan", *SHAPE, "--trace", path).stdout
    assert "10 requests in 9.0 hours: 2,700 prompt tokens, of them 81.5% in 4 passages" in text


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": at, "input_length": 1, "output_length": 1, "hash_ids": {"passages_ids": passages}}
        for at, passages in enumerate(TRACE)
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def test_simulate_is_the_librarys(trace):
    result = invoke("simulate", trace, "--memory", "4KiB", "--memory", "1MiB", "--disk", "8KiB", "--kv", "lazy",
                    "--question-tokens", 7, "--prefill-rate", 4000, "--bytes-per-token", 256, "--json")  # fmt: skip
    assert result.exit_code == 0, result.output
    budgets = [Budgets(size << 10, 8 << 10, eager=False) for size in (4, 1024)]
    rates = MachineRates(4000.0)
    outcomes = simulate(recorded(trace, 256), budgets, list(POLICIES), list(ADMISSIONS), rates, question_tokens=7)
    expected = [outcome.to_json() for outcome in outcomes]
    assert json.loads(result.stdout)["outcomes"] == json.loads(json.dumps(expected))


def test_simulate_takes_room_in_tokens(trace):
    """The room is all 28 tokens of the blocks, with the default bytes per token."""
    result = invoke("simulate", trace, "--room", 28, "--eviction", "lru", "--admission", "all", "--json")
    (outcome,) = json.loads(result.stdout)["outcomes"]
    assert outcome["memory_bytes"] == 28 * 131072
    assert outcome["token_rate"]["memory"] + outcome["token_rate"]["disk"] == 1


def test_simulate_in_words(trace):
    options = "--bytes-per-token", 256, "--memory", "4KiB", "--eviction", "lru", "--admission", "all"
    result = invoke("simulate", trace, *options)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("2 requests, 4 reads of 3 blocks, 7.0 KiB in all")
    assert sum(line.startswith("4.0 KiB") for line in result.stdout.splitlines()) == 1
    assert "Belady" in result.stdout
