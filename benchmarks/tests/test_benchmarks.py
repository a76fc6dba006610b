"""Every benchmark at toy size: it runs, checks its own answers and writes what it should. Nothing here is timed."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import corpus_report, decode, ingest, methods, ops, plain, run, timing, ttft
from benchmarks.corpus_report import Question, recall
from benchmarks.prose import documents, train_tokenizer
from benchmarks.reading import Bench, random_prompt
from benchmarks.shapes import SHAPES, build
from benchmarks.timing import Ratio, Timing, Variant, alternate, ratio
from ragcache.errors import ConfigError, RagCacheError
from ragcache.fusion import METHODS
from ragcache.fusion.fuse import fuse
from ragcache_demo.bag_of_words import BagOfWords

FIELDS = {"name", "settings", "hardware", "timings", "ratios", "figures", "goals"}
HARDWARE = {"cpu", "cores", "threads", "torch", "command", "date", "load_1min", "load_after_1min", "commit", "clean"}
GOAL = {"what", "kind", "limit", "measured", "applies", "pairs", "low", "high", "verdict"}
TINY_TTFT = [
    "--shape=toy",
    "--passages=3",
    "--tokens=20",
    "--suffix=5",
    "--rounds=2",
    "--long-rounds=1",
    "--vectors=120",
]


def written(directory: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory / f"{name}.json").read_text())
    assert set(found) == FIELDS
    assert set(found["hardware"]) >= HARDWARE
    assert all(timing["min_s"] <= timing["median_s"] <= timing["max_s"] for timing in found["timings"].values())
    assert all(set(goal) == GOAL for goal in found["goals"])
    return found


def test_ttft(tmp_path: Path) -> None:
    arguments = [*TINY_TTFT, "--workdir", str(tmp_path), "--out", str(tmp_path / "out")]
    result = ttft.main(arguments, BagOfWords)
    found = written(tmp_path / "out", result.name)
    phases = ("retrieve", "load", "rotate and place", "floor", "first token", "reposition", "transformers")
    assert all(any(name.startswith(phase) for name in found["timings"]) for phase in phases)
    assert [goal["limit"] for goal in found["goals"]] == [1.10, 1.10, 0.020, 0.08]
    assert not any(goal["applies"] for goal in found["goals"])
    assert str(tmp_path) not in found["hardware"]["command"]
    assert "--passages=3" in found["hardware"]["command"]


def test_ttft_refuses_to_time_wrong_answers(tmp_path: Path) -> None:
    with Bench(build("toy"), 3, 20, 5, tmp_path, seed=0) as bench:
        assert max(ttft.agreement(bench).values()) < 1e-3
        bench._context._buffers.keys[0].add_(10.0)
        with pytest.raises(RagCacheError, match="what would be timed"):
            ttft.agreement(bench)


@pytest.mark.slow
def test_floor_and_reposition_leave_the_context_as_it_was(tmp_path: Path) -> None:
    with Bench(build("toy"), 3, 20, 5, tmp_path, seed=1) as bench:
        before = bench.floor_logits()
        tokens = {bench.floor(), bench.reposition_memory(), bench.reposition_in_hand(), bench.reposition_on_device()}
        bench.forget_all()
        tokens.add(bench.reposition_disk())
        assert torch.equal(bench.floor_logits(), before)
        assert tokens == {int(before.argmax())}
        assert bench.cold_read_bytes is None or bench.cold_read_bytes >= 0


TINY_METHODS = ["--shape=toy", "--passages=3", "--tokens=40", "--suffix=5", "--rounds=2", "--long-rounds=1"]


@pytest.mark.slow
def test_methods_lists_what_every_method_computes_and_keeps(tmp_path: Path) -> None:
    result = methods.main([*TINY_METHODS, "--out", str(tmp_path)])
    found = written(tmp_path, result.name)
    rows = [name for name in found["timings"] if not name.startswith(("floor", "transformers"))]
    assert {row.partition(",")[0] for row in rows} == set(METHODS) - {"cartridge"}
    assert all(f"{row} / {methods.FULL}" in found["ratios"] for row in rows)
    # 120 tokens in 3 passages and 5 behind them; the toy shape has 2 layers
    computed = {row: found["figures"][f"{row}: computed tokens"] for row in rows}
    assert (computed["full"], computed["reposition"], computed["epic, 16 tokens"]) == (125, 5, 5 + 2 * 16)
    assert (computed["a3, 0.15"], computed["link, 5 tokens"]) == (5 + 18, 5 + 3 * 5)
    assert computed["cacheblend, 0.15"] == 125  # layer 0 in full; layer 1 projects all tokens
    assert found["figures"]["link, 5 tokens: kept tokens"] == 140
    assert all(0 < found["figures"][f"{row}: kept share"] <= 1 for row in rows)
    limits = {goal["what"].partition(" / ")[0].partition(":")[0]: goal["limit"] for goal in found["goals"]}
    assert (limits["a3, 0.15"], limits["cacheblend, 0.15"], limits["epic, 16 tokens"]) == (0.25, 0.25, 0.08)
    assert not any(goal["applies"] for goal in found["goals"])


def test_methods_refuses_to_time_wrong_answers() -> None:
    bench = methods.Bench(build("toy"), methods.Settings(shape="toy", passages=3, tokens=20, suffix=5))
    assert max(methods.agreement(bench).values()) < 1e-3
    bench._link_context._buffers.keys[0].add_(10.0)
    with pytest.raises(RagCacheError, match="link_floor_error is"):
        methods.agreement(bench)


def test_ingest(tmp_path: Path) -> None:
    arguments = ["--shape", "toy", "--tokens", "600", "--chunk-tokens", "100", "--rounds", "1", "--workdir"]
    result = ingest.main([*arguments, str(tmp_path), "--out", str(tmp_path / "out")], BagOfWords)
    found = written(tmp_path / "out", result.name)
    # 2 layers x 2 KV heads x 12 wide x keys and values x 4 bytes, and a header a block
    assert 384 < found["figures"]["bytes_per_token"] < 500
    assert 540 <= found["figures"]["tokens"] <= 700
    assert list(found["timings"]) == [ingest.WHOLE, ingest.DECODER, ingest.CALL]


def test_decode(tmp_path: Path) -> None:
    result = decode.main(["--shape=toy", "--context=40", "--tokens=6", "--rounds=2", "--out", str(tmp_path)])
    found = written(tmp_path, result.name)
    assert found["figures"]["same_tokens"]
    assert found["timings"]["ragcache, a token"]["runs"] == 2


@pytest.fixture
def corpus(tmp_path: Path) -> list[str]:
    rows = [
        {"id": "moon", "title": "Moon", "text": "The moon circles the earth once a month.", "source": "a"},
        {"id": "sea", "title": "Sea", "text": "Salt water covers most of the planet.", "source": "b"},
    ]
    questions = [{"question": "what circles the earth", "meta": {"gold_ids": ["moon"]}}]
    for name, lines in (("corpus", rows), ("questions", questions)):
        with gzip.open(tmp_path / f"{name}.jsonl.gz", "wt") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
    return [str(tmp_path / "corpus.jsonl.gz"), str(tmp_path / "questions.jsonl.gz")]


def test_corpus_report(tmp_path: Path, corpus: list[str]) -> None:
    options = ["--shape", "toy", "--workdir", str(tmp_path), "--out", str(tmp_path / "out")]
    result = corpus_report.main([*corpus, *options], BagOfWords)
    figures = written(tmp_path / "out", result.name)["figures"]
    assert (figures["documents"], figures["failed"], figures["questions"]) == (2, 0, 1)
    assert figures["recall@5"] == figures["recall@10"] == 1.0
    assert figures["kv_bytes_per_token"] > 384
    lazy = corpus_report.main([*corpus, *options, "--kv", "lazy"], BagOfWords)
    assert lazy.name == f"{result.name}-lazy"
    assert written(tmp_path / "out", result.name)["figures"] == figures, "it was replaced by one without KV"
    assert written(tmp_path / "out", lazy.name)["figures"]["recall@5, hybrid"] == 1.0


def test_corpus_report_names_a_pair_that_does_not_fit(tmp_path: Path, corpus: list[str]) -> None:
    options = ["--shape", "toy", "--out", str(tmp_path)]
    with pytest.raises(ConfigError, match=r"corpus\.jsonl\.gz, line 1: it has no meta, question"):
        corpus_report.main([corpus[0], corpus[0], *options], BagOfWords)
    other = tmp_path / "other.jsonl"
    other.write_text('{"question": "q", "meta": {"gold_ids": ["sun"]}}\n{"question"\n')
    with pytest.raises(ConfigError, match=r"other\.jsonl, line 2: not JSON"):
        corpus_report.main([corpus[0], str(other), *options], BagOfWords)
    other.write_text('{"question": "q", "meta": {"gold_ids": ["sun"]}}\n')
    with pytest.raises(ConfigError, match=r"other\.jsonl: no question's gold_ids are ids of corpus\.jsonl\.gz"):
        corpus_report.main([corpus[0], str(other), *options], BagOfWords)


@pytest.mark.slow
def test_run_draws_and_lists_goals(tmp_path: Path, corpus: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--quick", "--shape", "toy", "--workdir"]
    results = run.main([*options, str(tmp_path), "--out", str(tmp_path / "out")], BagOfWords)
    assert [goal.limit for result in results for goal in result.goals] == [1.10, 1.10, 0.020, 0.08, 0.90, 1.0]
    assert (tmp_path / "out" / "benchmarks-cpu.png").read_bytes().startswith(b"\x89PNG")
    assert "other sizes than the goal's" in capsys.readouterr().out


def test_recall_counts_questions_with_a_gold_row_among_the_first() -> None:
    questions = [Question("", frozenset({"a", "b"})), Question("", frozenset({"c"}))]
    ranked = [["x", "b", "a"], ["x", "y", "z", "c"]]
    assert [recall(ranked, questions, depth) for depth in (1, 2, 4)] == [0.0, 0.5, 1.0]


def test_alternate_runs_long_variants_in_some_rounds_and_pairs_by_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "stolen_s", lambda: 0.0)
    order: list[str] = []
    variants = [
        Variant("short", lambda: order.append("short")),
        Variant("long", lambda: order.append("long"), prepare=lambda: order.append("prepare"), long=True),
    ]
    samples = alternate(variants, 6, 2, torch.device("cpu"))
    assert order[:3] == ["short", "prepare", "long"]  # the warm-up
    assert (len(samples["short"]), sorted(samples["long"])) == (6, [0, 3])
    assert order.count("prepare") == order.count("long") == 3
    given = {"a": {0: 2.0, 1: 9.0, 2: 6.0}, "b": {0: 1.0, 2: 2.0}}
    assert ratio(given, "a", "b") == Ratio(2.5, 2.0, 3.0, 2, 2.0, 3.0)
    assert Timing.of([3.0, 1.0, 2.0]) == Timing(2.0, 1.0, 3.0, 3)


def test_a_sample_that_the_hypervisor_interrupted_is_taken_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three runs lose half, a tenth and none of the processors' time; the clock stands still but for `run`."""
    now, stolen, lost = [0.0], [0.0], iter([0.0, 0.5, 0.1, 0.0])
    monkeypatch.setattr(timing, "stolen_s", lambda: stolen[0])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(timing.os, "cpu_count", lambda: 4)
    lengths = iter([1.0, 8.0, 4.0, 2.0])

    def run() -> None:
        seconds = next(lengths)
        now[0] += seconds
        stolen[0] += next(lost) * seconds * 4

    assert alternate([Variant("one", run)], 1, 1, torch.device("cpu")) == {"one": {0: 2.0}}


def test_the_sample_that_lost_least_counts_where_none_was_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    now, stolen, lengths = [0.0], [0.0], iter([1.0, *range(10, 10 + timing.TRIES)])
    monkeypatch.setattr(timing, "stolen_s", lambda: stolen[0])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])

    def run() -> None:
        now[0] += next(lengths)
        stolen[0] += 1.0 if now[0] > 2 else 0.0

    samples = alternate([Variant("one", run)], 1, 1, torch.device("cpu"))
    assert samples == {"one": {0: 10.0 + timing.TRIES - 1}}


def test_two_faces_share_weights_and_nothing_else() -> None:
    built = build("toy", seed=3)
    ours = dict(built.lm.model.named_parameters())
    assert all(ours[name].data_ptr() == value.data_ptr() for name, value in built.plain.named_parameters())
    assert built.plain.config._attn_implementation == "sdpa"
    assert built.lm.model.config._attn_implementation == "ragcache"
    prompt = random_prompt(512, 2, 15, 4, seed=0)
    expected = plain.full_prefill(built.plain, prompt.ids)
    assert torch.allclose(fuse(built.lm, prompt, "full").next_logits, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("shape", "parameters", "kv_values_per_token"),
    [
        ("SmolLM2-135M", 134_515_008, 11_520),
        ("Llama-3.2-1B", 1_235_814_400, 16_384),
        ("Llama-3.1-8B", 8_030_261_248, 65_536),
    ],
)
def test_shapes_have_the_published_sizes(shape: str, parameters: int, kv_values_per_token: int) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**SHAPES[shape])
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    assert 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim == kv_values_per_token


def test_documents_have_the_tokens_asked_for() -> None:
    tokenizer = train_tokenizer(vocab_size=512)
    texts = documents(tokenizer, 5000)
    counts = [len(tokenizer(one.text, add_special_tokens=False)["input_ids"]) for one in texts]
    assert 4900 <= sum(counts) <= 5100


@pytest.mark.parametrize(("passages", "loads"), [(2, 1), (10, 1), (10, 3)])
def test_vllms_connector_launches_one_kernel_a_layer_and_copies_nothing(tmp_path: Path, passages, loads) -> None:
    """Whatever the number of blocks, and of requests in a step. The plain way copies two tensors a layer to the pages'
    device, and joins them before."""
    pytest.importorskip("triton", reason="counts launches")
    layers = 2
    with Bench(build("toy"), passages, 20, 6, tmp_path, seed=0) as bench:
        found = ops.count_connector(bench, loads, by_kernel=True)
        plain = ops.count_connector(bench, loads)
    assert found["kernel launch"] == layers
    assert ops.working(found) == layers, found
    assert plain["cat"] == 2 * layers
    assert ops.working(plain) <= 14 * layers


def test_placing_costs_two_copies_a_block_and_a_rotation(tmp_path: Path) -> None:
    """Counts do not depend on the machine's load: needless work on the hot path fails here first."""
    with Bench(build("toy"), 5, 20, 6, tmp_path, seed=0) as bench:
        counts = ops.profile(bench)
    layers, blocks = 2, 5
    # keys and values of each block, the positions; then two multiplications and two fused multiply-adds
    assert counts["rotate and place"]["copy_"] <= layers * (2 * blocks + 1)
    extra = ops.working(counts["reposition"]) - ops.working(counts["floor"])
    assert extra <= layers * (2 * blocks + 5) + 30
    assert ops.working(counts["decode a token"]) <= ops.working(counts["transformers: full caches"]) + 10
    assert not any(counts[name]["cat"] > 2 * layers + 4 for name in ("floor", "decode a token"))  # rotate_half only
