"""Blocks on a CPU's pages by the function in C++, against the plain way and NumPy. No vLLM is needed."""

import logging
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from families import save_tiny
from paged import LOADS, NUM_LAYERS, PAGE_TOKENS, assert_parts_placed, paged_layers, step, worker
from placed_oracle import random_block
from waiting import until

import ragcache as rc
from ragcache import native
from ragcache.fusion.place_check import random_block as block_like
from ragcache.kv.block import KVBlock
from ragcache.models.language_model import LanguageModel
from ragcache_vllm.host_kernel import HostKernel, place_function
from ragcache_vllm.placing import PagedLayer, Shard, page_views
from ragcache_vllm.plan import Load
from ragcache_vllm.probe import is_kernel_right

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
HEADS, WIDTH = 3, 16


@pytest.fixture(autouse=True)
def _has_function() -> None:
    if place_function() is None:
        pytest.skip("needs a C++ compiler and an x86 processor with AVX2")


@pytest.fixture(scope="module", params=DTYPES, ids=str)
def lm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    saved = save_tiny("llama", str(tmp_path_factory.mktemp("llama")))
    return rc.load_lm(saved, dtype=request.param)


def blocks_of(lm: LanguageModel, codec: str = "raw") -> dict[str, KVBlock]:
    return {key: block_like(lm.shape, codec, count) for key, count in (("a", 40), ("b", 64))}


def assert_same(ours: dict[str, PagedLayer], plain: dict[str, PagedLayer]) -> None:
    """All pages, bit for bit."""
    for name, paged in ours.items():
        assert torch.equal(paged.layer.kv_cache, plain[name].layer.kv_cache)


def placed_plainly(
    lm: LanguageModel, blocks: dict[str, KVBlock], loads: Sequence[Load] = LOADS
) -> dict[str, PagedLayer]:
    layers = paged_layers(lm)
    side = worker(lm, blocks, layers, by_kernel=False)
    step(side, loads)
    side.close()
    return layers


@pytest.mark.parametrize("card", [False, True])
@pytest.mark.parametrize("shard", [Shard(0, 1), Shard(1, 2)])
def test_it_fills_pages_bit_for_bit_as_the_plain_way_does(lm, shard, card, monkeypatch):
    """Two requests, parts of their blocks, a rank's own heads; whatever else is on the pages stays."""
    found, calls, place = [], [], HostKernel.place
    monkeypatch.setattr(HostKernel, "place", lambda *given: (calls.append(given), place(*given)))
    for by_kernel in (True, False):
        layers = paged_layers(lm, shard.num_ranks, card=card)
        side = worker(lm, blocks_of(lm), layers, shard, by_kernel=by_kernel)
        step(side)
        side.close()
        found.append(layers)
    assert len(calls) == NUM_LAYERS
    assert_same(*found)
    before, after = (one["layers.1"].pages[1] for one in (paged_layers(lm, shard.num_ranks, card=card), found[0]))
    assert int((before != after).any(3).any(0).sum()) == 90


@pytest.mark.parametrize("half", [0, 6, 8])
@pytest.mark.parametrize("page_tokens", [16, 24, 48])
@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize("to", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_parts_of_blocks_go_to_their_slots_and_nowhere_else(dtype, to, by_channel, page_tokens, half):
    """Heads 1 and 2 of three, of tokens from the middle of blocks, over pages in no order, against float64."""
    blocks = [random_block(2, HEADS, tokens, WIDTH, WIDTH, dtype) for tokens in (600, 40, 33)]
    parts_of = [(530, 50), (8, 32), (0, 1)]
    total, num_pages = sum(count for _, count in parts_of), 9
    # Slots in runs of 7: within a page, and from one page to the next.
    runs = torch.randperm(num_pages * page_tokens // 7, generator=torch.Generator().manual_seed(1))
    slots = (runs[:, None] * 7 + torch.arange(7)).flatten()[:total].contiguous()
    cache = torch.full((num_pages, HEADS - 1, page_tokens, 2 * WIDTH), torch.nan, dtype=to)
    pages, bound = page_views(cache, by_channel=by_channel), torch.finfo(to).eps
    kernel = HostKernel.of(blocks, torch.device("cpu"), parts_of)
    assert_parts_placed(kernel, blocks, parts_of, pages, slots, half, rtol=bound, atol=max(bound / 8, 1e-6))


def test_a_load_ahead_has_ended_when_its_pages_are_there(lm):
    blocks, layers = blocks_of(lm), paged_layers(lm)
    side = worker(lm, blocks, layers)
    side.begin([Load("one", LOADS[0].stretches, LOADS[0].page_ids, [], 90, True)])
    until(lambda: side.finished() == {"one"})
    assert_same(layers, placed_plainly(lm, blocks, LOADS[:1]))
    side.close()


def test_mapped_blocks_are_not_copied(lm, monkeypatch):
    monkeypatch.setattr("ragcache_vllm.placing.private_copy", lambda *_, **__: pytest.fail("a block was copied"))
    side = worker(lm, blocks_of(lm), paged_layers(lm))
    step(side)
    side.close()


# Where it cannot.


@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_encoded_blocks_go_the_plain_way(lm, codec):
    blocks, layers = blocks_of(lm, codec), paged_layers(lm)
    side = worker(lm, blocks, layers)
    step(side)
    side.close()
    assert_same(layers, placed_plainly(lm, blocks))


@pytest.mark.parametrize("why", ["no compiler", "another processor", "switched off"])
def test_a_machine_without_it_goes_the_plain_way(lm, monkeypatch, why, caplog):
    if why == "no compiler":
        monkeypatch.setattr(native, "load", lambda *_: None)
    elif why == "another processor":
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    else:
        monkeypatch.setenv("RAGCACHE_PLACE", "plain")
    blocks, layers = blocks_of(lm), paged_layers(lm)
    assert not is_right(lm, layers)
    assert not caplog.records
    side = worker(lm, blocks, layers)
    step(side)
    side.close()
    monkeypatch.undo()
    assert_same(layers, placed_plainly(lm, blocks))


def test_heads_that_are_too_wide_are_refused():
    block = random_block(1, 1, 4, 520, 520, torch.float32)
    kernel = HostKernel.of([block], torch.device("cpu"), [(0, 4)])
    pages = torch.zeros(1, 1, 16, 520)
    with pytest.raises(ArithmeticError, match="keys of 520"):
        kernel.place(0, None, pages, pages.clone(), torch.arange(4))
    assert not pages.any()


# Its first use.


def is_right(lm: LanguageModel, layers: dict[str, PagedLayer]) -> bool:
    return is_kernel_right(list(layers.values()), lm.rope, Shard(0, 1), PAGE_TOKENS, lm.dtype)


def test_it_is_used_after_it_was_right_and_pages_stay(lm, caplog):
    layers = paged_layers(lm)
    assert is_right(lm, layers)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert_same(layers, paged_layers(lm))


MUTANTS = {
    "turned the other way": ("std::fma(-second,", "std::fma(second,"),
    "cos for sin": ("std::fma(first, sin[d],", "std::fma(first, cos[d],"),
    "angles of the first token": ("(part.first + token) * half", "part.first * half"),
    "a token of each tile is missing": ("token < run; ++token)\n        to[", "token < run - 1; ++token)\n        to["),
    "values of the keys": ("(const From*)part.values +", "(const From*)part.keys +"),
}


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache directory of all processes that run the tests: each mutant is compiled once, not once for each dtype."""
    base = tmp_path_factory.getbasetemp()
    return (base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base) / "mutants"


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_wrong_function_is_named_and_not_used(lm, mutant, monkeypatch, tmp_path, compiled, caplog):
    source = Path(native.__file__).with_name("pages.cpp").read_text(encoding="utf-8")
    assert source.count(MUTANTS[mutant][0]) == 1
    (tmp_path / "native").mkdir()
    (tmp_path / "native" / "pages.cpp").write_text(source.replace(*MUTANTS[mutant]), encoding="utf-8")
    monkeypatch.setenv("XDG_CACHE_HOME", str(compiled))
    monkeypatch.setattr(native, "__file__", str(tmp_path / "native" / "__init__.py"))
    native.load.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            assert not is_right(lm, paged_layers(lm))
    finally:
        monkeypatch.undo()
        native.load.cache_clear()
    [record] = caplog.records
    assert "off, more than" in record.getMessage()
