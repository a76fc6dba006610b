"""`ragcache plan` and `ragcache simulate`: what they print is what the library computes, and how they refuse."""

import json

import pytest
from terminal import invoke

from ragcache.codecs import CODECS
from ragcache.store.eviction import ADMISSIONS, POLICIES
from ragcache_plan.accesses import Workload, generated
from ragcache_plan.plan import Corpus, Demand, Prices, make_plan
from ragcache_plan.rates import MachineRates
from ragcache_plan.replay import Budgets, simulate
from ragcache_plan.shape import KVShape
from ragcache_plan.stated import shape_of

SHAPE = ["--layers", 32, "--kv-heads", 8, "--head-dim", 128]
CORPUS = ["--documents", 100, "--tokens", 1000]
STREAM = ["--requests", 200, "--blocks", 100, "--bytes-per-token", 1024]


def test_plan_is_the_librarys():
    result = invoke(
        "plan", *SHAPE, *CORPUS, "--requests", 10**6, "--request-tokens", 5000, "--tier", "memory", "--zipf", 0.5,
        "--gpu-hour", 2, "--gb-month", 0.1, "--months", 3, "--prefill-rate", 4000, "--memory-rate", 2e10, "--json",
        "--network-rate", 1e9, "--replicas", 3, "--gb-transfer", 0.01,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    expected = make_plan(
        KVShape(32, 8, 128),
        Corpus(100, 1000),
        Demand(10**6, 5000, zipf=0.5, tier="memory", replicas=3),
        MachineRates(4000.0, memory_bytes_s=2e10, network_bytes_s=1e9),
        Prices(2.0, 0.1, 3.0, 0.01),
    ).to_json()
    assert {name: found[name] for name in expected} == json.loads(json.dumps(expected))
    assert set(found) - set(expected) == {"memory_bytes", "policy", "admission", "memory_share", "reason"}
    assert found["bytes_per_token"] == 131072


def test_plan_in_words():
    result = invoke("plan", "--model", "mini", *CORPUS, "--requests", 1000)
    assert result.exit_code == 0, result.output
    assert f"{shape_of('mini').bytes_per_token:,} bytes a token" in result.stdout
    assert "1,000 requests a month" in result.stdout
    rows = [line.split()[0] for line in result.stdout.splitlines() if line]
    assert set(CODECS) <= set(rows)
    assert "- policy lru" in result.stdout or "- keep no KV" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        ([*SHAPE, "--documents", 0, "--tokens", 5], 2, "--documents is 0"),
        ([*SHAPE, *CORPUS, "--gpu-hour", -1], 2, "--gpu-hour is -1"),
        ([*SHAPE, *CORPUS, "--kv-kept", 1.5], 2, "--kv-kept is 1.5"),
        ([*SHAPE, *CORPUS, "--prefill-rate", 0], 2, "--prefill-rate is 0"),
        ([*SHAPE, *CORPUS, "--question-tokens", 5000], 2, "--question-tokens is 5000"),
        ([*SHAPE, *CORPUS, "--dtype", "int3"], 2, "--dtype 'int3'"),
        ([*SHAPE, *CORPUS, "--measure"], 2, "--measure runs the model"),
        ([*SHAPE[:4], *CORPUS], 2, "--head-dim is missing"),
        ([*SHAPE, *CORPUS, "--model", "mini"], 2, "give one of them"),
        (["--model", "/no/such/model", *CORPUS], 1, "/no/such/model"),
    ],
)
def test_plan_refuses_in_one_line(arguments, status, message):
    result = invoke("plan", *arguments)
    assert result.exit_code == status, result.output
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert message in result.stderr


def test_simulate_is_the_librarys():
    result = invoke("simulate", *STREAM, "--chunk-tokens", "100-200", "--memory", "1MiB", "--memory", "4MiB",
                    "--disk", "8MiB", "--kv", "lazy", "--drift", 50, "--session", 3, "--json")  # fmt: skip
    assert result.exit_code == 0, result.output
    trace = generated(
        Workload(requests=200, blocks=100, drift=50, session=3.0, tokens=(100, 200), bytes_per_token=1024)
    )
    budgets = [Budgets(size << 20, 8 << 20, eager=False) for size in (1, 4)]
    expected = [outcome.to_json() for outcome in simulate(trace, budgets, list(POLICIES), list(ADMISSIONS))]
    assert json.loads(result.stdout)["outcomes"] == json.loads(json.dumps(expected))


def test_both_know_the_share_that_is_kept():
    found = json.loads(invoke("plan", *SHAPE, *CORPUS, "--kv-kept", 0.5, "--json").stdout)
    expected = make_plan(KVShape(32, 8, 128), Corpus(100, 1000, kept=0.5), Demand(100_000, 1310)).to_json()
    assert found["codecs"] == json.loads(json.dumps(expected))["codecs"]
    less, half = (
        invoke("simulate", *STREAM[:4], *more, "--memory", "1MiB", "--json").stdout
        for more in (["--bytes-per-token", 1000, "--kv-kept", 0.5], ["--bytes-per-token", 500])
    )
    assert json.loads(less) == json.loads(half)


def test_simulate_in_words():
    result = invoke("simulate", *STREAM, "--memory", "4MiB", "--eviction", "lru", "--admission", "all")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("200 requests, 1,000 reads of 100 blocks")
    assert sum(line.startswith("4.0 MiB") for line in result.stdout.splitlines()) == 1
    assert "Belady" in result.stdout


def test_simulate_replays_what_a_store_recorded(store, tmp_path):
    trace = tmp_path / "trace.jsonl"
    for question in ("Where is the cat?", "Dogs?"):
        options = ["--method", "reposition", "--k", 2, "--max-tokens", 1, "--trace", trace]
        asked = invoke("ask", question, "--store", store, *options)
        assert asked.exit_code == 0, asked.output
    result = invoke("simulate", trace, "--memory", "1GiB", "--eviction", "lru", "--admission", "all", "--json")
    assert result.exit_code == 0, result.output
    (outcome,) = json.loads(result.stdout)["outcomes"]
    assert (outcome["requests"], outcome["accesses"]) == (2, 4)


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--requests", 0], 2, "--requests is 0"),
        (["--chunk-tokens", "many"], 2, "--chunk-tokens 'many'"),
        (["--chunk-tokens", "9-3"], 2, "--chunk-tokens is 9-3"),
        ([*STREAM, "--eviction", "random"], 2, "'random' is unknown"),
        ([*STREAM, "--admission", "bouncer"], 2, "'bouncer' is unknown"),
        ([*STREAM, "--memory", "1KiB"], 2, "holds no block"),
        ([*STREAM, "--question-tokens", -1], 2, "--question-tokens is -1"),
        (["/no/such/trace"], 1, "/no/such/trace: cannot be read"),
    ],
)
def test_simulate_refuses_in_one_line(arguments, status, message):
    result = invoke("simulate", *arguments)
    assert result.exit_code == status, result.output
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert message in result.stderr


def test_simulate_names_the_line_that_is_bad(tmp_path):
    (tmp_path / "trace.jsonl").write_text('{"at": 1}\n')
    result = invoke("simulate", tmp_path / "trace.jsonl")
    assert result.exit_code == 1
    assert "trace.jsonl, line 1: it has no 'request'" in result.stderr


@pytest.mark.parametrize("option", ["--memory", "--disk"])
def test_sizes_that_are_none(option):
    assert invoke("simulate", *STREAM, option, "3 apples").exit_code == 2
