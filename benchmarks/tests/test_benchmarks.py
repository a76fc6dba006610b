"""Every benchmark at toy size runs, checks its own answers and writes its results. Times are not tested."""

import json
from pathlib import Path
from typing import Any

import op_counts
import pytest
import torch

import ragcache as rc
from benchmarks import ingest, methods, plain, timing, ttft
from benchmarks.prose import documents, train_tokenizer
from benchmarks.reading import Bench, random_prompt
from benchmarks.runner import main
from benchmarks.shapes import SHAPES, build, write_checkpoint
from benchmarks.timing import Ratio, Timing, Variant, alternate, ratio
from ragcache.errors import RagCacheError
from ragcache.fusion import METHODS
from ragcache.fusion.fuse import fuse

FIELDS = {"name", "settings", "hardware", "timings", "ratios", "figures", "goals"}
HARDWARE = {"cpu", "cores", "threads", "torch", "command", "date", "load_1min", "load_after_1min", "commit", "clean"}
GOAL = {"what", "kind", "limit", "measured", "applies", "pairs", "low", "high", "verdict"}
TINY_TTFT = [
    "--shape=toy", "--passages=3", "--tokens=20", "--suffix=5", "--rounds=2", "--long-rounds=1", "--vectors=120",
    "--embedder=words",
]  # fmt: skip


def written(directory: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory / f"{name}.json").read_text())
    assert set(found) == FIELDS
    assert set(found["hardware"]) >= HARDWARE
    assert all(timing["min_s"] <= timing["median_s"] <= timing["max_s"] for timing in found["timings"].values())
    assert all(set(goal) == GOAL for goal in found["goals"])
    return found


def test_ttft(tmp_path: Path) -> None:
    arguments = [*TINY_TTFT, "--workdir", str(tmp_path), "--out", str(tmp_path / "out")]
    result = main("ttft", [*arguments, "--codecs", "int8"])
    found = written(tmp_path / "out", result.name)
    phases = ("retrieve", "load", "rotate and place", "floor", "first token", "reposition", "transformers")
    assert all(any(name.startswith(phase) for name in found["timings"]) for phase in phases)
    assert [goal["limit"] for goal in found["goals"]] == [1.10, 1.10, 0.020, 0.08, 1.0]
    assert "int8: disk, cold page cache / reposition: disk, cold page cache" in found["ratios"]
    assert (tmp_path / "out" / f"{result.name}.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "out" / f"{result.name}.md").read_text()
    assert all(f"| {name} | " in page for part in ("timings", "ratios", "figures") for name in found[part])
    assert not list((tmp_path / "out").glob("*.jsonl")), "the journal goes when the result is there"
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
        tokens = {bench.floor(), *map(bench.reposition, (bench.load_memory(), bench.in_hand, bench.on_device))}
        bench.forget_all()
        tokens.add(bench.reposition(bench.load_disk()))
        assert torch.equal(bench.floor_logits(), before)
        assert tokens == {int(before.argmax())}
        assert bench.cold_read_bytes is None or bench.cold_read_bytes >= 0


TINY_METHODS = ["--shape=toy", "--passages=3", "--tokens=40", "--suffix=5", "--rounds=2", "--long-rounds=1"]


@pytest.mark.slow
def test_methods_lists_what_every_method_computes_and_keeps(tmp_path: Path) -> None:
    result = main("methods", [*TINY_METHODS, "--out", str(tmp_path)])
    found = written(tmp_path, result.name)
    rows = [name for name in found["timings"] if not name.startswith(("floor", "transformers"))]
    assert {row.partition(",")[0] for row in rows} == set(METHODS)
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
    arguments = ["--shape", "toy", "--tokens", "600", "--chunk-tokens", "100", "--rounds", "1", "--embedder", "words"]
    result = main("ingest", [*arguments, "--workdir", str(tmp_path), "--out", str(tmp_path / "out")])
    found = written(tmp_path / "out", result.name)
    # 2 layers x 2 KV heads x 12 wide x keys and values x 4 bytes, and a header a block
    assert 384 < found["figures"]["bytes_per_token"] < 500
    assert 540 <= found["figures"]["tokens"] <= 700
    assert list(found["timings"]) == [ingest.WHOLE, ingest.DECODER]


def test_decode(tmp_path: Path) -> None:
    result = main("decode", ["--shape=toy", "--context=40", "--tokens=6", "--rounds=2", "--out", str(tmp_path)])
    found = written(tmp_path, result.name)
    assert found["figures"]["same_tokens"]
    assert found["timings"]["ragcache, a token"]["runs"] == 2


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


@pytest.mark.parametrize(
    ("seconds", "lost", "counts"),
    [
        ([1.0, 8.0, 4.0, 2.0], [0.0, 0.5, 0.1, 0.0], 2.0),
        (
            [1.0, *range(10, 10 + timing.TRIES)],
            [0.0, *(2 / n for n in range(10, 10 + timing.TRIES))],
            9.0 + timing.TRIES,
        ),
    ],
    ids=["it is taken again", "the sample that lost least counts if none lost little"],
)
def test_a_sample_that_the_hypervisor_interrupted(monkeypatch: pytest.MonkeyPatch, seconds, lost, counts) -> None:
    """The warm-up and each try lose a share of the processors' time; the clock advances only in `run`."""
    now, stolen, runs = [0.0], [0.0], iter(zip(seconds, lost, strict=True))
    monkeypatch.setattr(timing, "stolen_s", lambda: stolen[0])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(timing.os, "cpu_count", lambda: 4)

    def run() -> None:
        taken, share = next(runs)
        now[0] += taken
        stolen[0] += share * taken * 4

    assert alternate([Variant("one", run)], 1, 1, torch.device("cpu")) == {"one": {0: counts}}


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
    """This does not depend on the number of blocks, or of requests in a step. The plain way copies two tensors per
    layer to the pages' device, and joins them before.
    """
    pytest.importorskip("triton", reason="counts launches")
    layers = 2
    with Bench(build("toy"), passages, 20, 6, tmp_path, seed=0) as bench:
        found = op_counts.count_connector(bench, loads, by_kernel=True)
        plain = op_counts.count_connector(bench, loads)
    assert found["kernel launch"] == layers
    assert op_counts.working(found) == layers, found
    assert plain["cat"] == 2 * layers
    assert op_counts.working(plain) <= 14 * layers


def test_placing_costs_two_copies_a_block_and_a_rotation(tmp_path: Path) -> None:
    """Counts of operations do not depend on the machine's load: needless work on the hot path is found here first."""
    with Bench(build("toy"), 5, 20, 6, tmp_path, seed=0) as bench:
        counts = op_counts.profile(bench)
    layers, blocks = 2, 5
    # keys and values of each block, the positions; then two multiplications and two fused multiply-adds
    assert counts["rotate and place"]["copy_"] <= layers * (2 * blocks + 1)
    extra = op_counts.working(counts["reposition"]) - op_counts.working(counts["floor"])
    assert extra <= layers * (2 * blocks + 5) + 30
    assert op_counts.working(counts["decode a token"]) <= op_counts.working(counts["transformers: full caches"]) + 10
    assert not any(counts[name]["cat"] > 2 * layers + 4 for name in ("floor", "decode a token"))  # rotate_half only


def test_a_random_model_of_a_shape_loads_as_any_other(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "toy")
    lm = rc.load_lm(tmp_path)
    assert lm.shape.num_layers == 2
    assert max(lm.tokenizer("Any text at all.")["input_ids"]) < lm.vocab_size


@pytest.mark.slow
def test_reuse(tmp_path: Path) -> None:
    """All clients find passages that are known."""
    result = main("reuse", ["--passages=3", "--characters=500", "--out", str(tmp_path)])
    shares = {(name, method): own for name, method, *own in written(tmp_path, result.name)["figures"]["shares"]}
    assert all(0 <= share <= 1 for both in shares.values() for own in both for share in own)
    found, cached = shares["ragcache's own passages", "reposition"]
    assert min(*found, *cached) > 0.9
    found, cached = shares["its stuff chain, documents precomputed", "reposition"]
    assert min(*found, *cached) > 0.8
    assert "| ragcache's own passages | reposition | 100% |" in (tmp_path / "reuse.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(("passages", "characters"), [(2, 300), (3, 500)])
def test_reuse_of_learnt_text(tmp_path: Path, passages: int, characters: int) -> None:
    """Passages in a stock chain's prompt are learnt, short paragraphs too. A killed run is continued."""
    size = [f"--passages={passages}", f"--characters={characters}", "--ways=stuff chain, documents no"]
    journal = tmp_path / "reuse.journal.jsonl"
    settings = {"model": "mini", "ways": "stuff chain, documents no", "passages": passages, "characters": characters}
    known = [{"key": "LangChain's stuff chain, documents nowhere, by default", "value": [[0.5, 0.25]] * 5}]
    journal.write_text("".join(json.dumps(line) + "\n" for line in (settings, *known)))
    result = main("reuse", [*size, "--out", str(tmp_path)])
    (_, _, *earlier), (_, method, found, _) = written(tmp_path, result.name)["figures"]["shares"]
    assert earlier == [[0.5] * 5, [0.25] * 5]
    assert (method, *found[:2]) == ("reposition", 0, 1)
    assert found[2] >= 0.6
    assert min(found[3:]) >= 0.95
    assert not journal.exists()
