"""Blocks on a CPU's pages by the function in C++, against the plain way and NumPy. No vLLM is needed."""

import logging
from pathlib import Path

import pytest
import torch
from families import save_tiny
from paged import (
    LOADS,
    NUM_LAYERS,
    assert_parts_placed,
    assert_same,
    blocks_of,
    is_right,
    num_changed,
    paged_layers,
    placed,
    worker,
)
from placed_oracle import random_block
from waiting import until

import ragcache as rc
from ragcache import native
from ragcache.models.language_model import LanguageModel
from ragcache_vllm.host_kernel import HostKernel, place_function
from ragcache_vllm.placing import Shard, page_views
from ragcache_vllm.plan import Load

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


@pytest.mark.parametrize("card", [False, True])
@pytest.mark.parametrize("shard", [Shard(0, 1), Shard(1, 2)])
def test_it_fills_pages_bit_for_bit_as_the_plain_way_does(lm, shard, card, monkeypatch):
    """Two requests, parts of their blocks, a rank's own heads; whatever else is on the pages stays."""
    calls, place = [], HostKernel.place
    monkeypatch.setattr(HostKernel, "place", lambda *given: (calls.append(given), place(*given)))
    ours, plain = (placed(lm, blocks_of(lm), LOADS, shard, by_kernel=by, card=card) for by in (True, False))
    assert len(calls) == NUM_LAYERS
    assert_same(ours, plain)
    assert num_changed(lm, ours, shard, card=card) == 90


@pytest.mark.parametrize(("page_tokens", "half"), [(16, 0), (24, 6), (48, 8)])
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
    assert_same(layers, placed(lm, blocks, LOADS[:1]))
    side.close()


def test_mapped_blocks_are_not_copied(lm, monkeypatch):
    monkeypatch.setattr("ragcache_vllm.placing.private_copy", lambda *_, **__: pytest.fail("a block was copied"))
    placed(lm, blocks_of(lm), by_kernel=True)


# Where it cannot.


@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_encoded_blocks_go_the_plain_way(lm, codec):
    blocks = blocks_of(lm, codec)
    assert_same(placed(lm, blocks, by_kernel=True), placed(lm, blocks))


@pytest.mark.parametrize("why", ["no compiler", "another processor", "switched off"])
def test_a_machine_without_it_goes_the_plain_way(lm, monkeypatch, why, caplog):
    if why == "no compiler":
        monkeypatch.setattr(native, "load", lambda *_: None)
    elif why == "another processor":
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    else:
        monkeypatch.setenv("RAGCACHE_PLACE", "plain")
    blocks = blocks_of(lm)
    assert not is_right(lm, paged_layers(lm))
    assert not caplog.records
    layers = placed(lm, blocks, by_kernel=True)
    monkeypatch.undo()
    assert_same(layers, placed(lm, blocks))


def test_heads_that_are_too_wide_are_refused():
    block = random_block(1, 1, 4, 520, 520, torch.float32)
    kernel = HostKernel.of([block], torch.device("cpu"), [(0, 4)])
    pages = torch.zeros(1, 1, 16, 520)
    with pytest.raises(ArithmeticError, match="keys of 520"):
        kernel.place(0, None, pages, pages.clone(), torch.arange(4))
    assert not pages.any()


# Its first use.


def test_it_is_used_after_it_was_right_and_pages_stay(lm, caplog):
    layers = paged_layers(lm)
    assert is_right(lm, layers)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert_same(layers, paged_layers(lm))


MUTANTS = {
    "turned the other way": ("std::fma(-second,", "std::fma(second,"),
    "angles of the first token": ("(part.first + token) * half", "part.first * half"),
    "a token of each tile is missing": ("token < run; ++token)\n        to[", "token < run - 1; ++token)\n        to["),
    "values of the keys": ("(const From*)part.values +", "(const From*)part.keys +"),
}


@pytest.mark.parametrize("lm", [torch.float32], indirect=True)
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_wrong_function_is_named_and_not_used(lm, mutant, monkeypatch, tmp_path, caplog):
    source = Path(native.__file__).with_name("pages.cpp").read_text(encoding="utf-8")
    assert source.count(MUTANTS[mutant][0]) == 1
    (tmp_path / "native").mkdir()
    (tmp_path / "native" / "pages.cpp").write_text(source.replace(*MUTANTS[mutant]), encoding="utf-8")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
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
