"""Blocks on vLLM's pages: by the kernel, in Triton's interpreter, against what vLLM's own writer is given. No vLLM is
needed."""

import logging
import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from families import load_tiny
from late_lane import LateLane
from paged import (
    LOADS,
    NUM_LAYERS,
    PAGE_TOKENS,
    assert_parts_placed,
    assert_same,
    blocks_of,
    is_right,
    num_changed,
    paged_layers,
    placed,
    step,
    worker,
)
from placed_oracle import coded
from placed_oracle import random_block as block_of
from torch import Tensor
from waiting import until

from ragcache.kv.block import KVBlock
from ragcache.models.language_model import LanguageModel
from ragcache_vllm import placing
from ragcache_vllm.placing import PagedLayer, Shard, page_views
from ragcache_vllm.plan import Load

pytest.importorskip("triton", reason="the kernel's tests need Triton")


@pytest.fixture(scope="module", autouse=True)
def interpreted() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        yield


@pytest.fixture(scope="module")
def lm(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    return load_tiny("llama", tmp_path_factory.mktemp("llama"))[0]


@pytest.fixture
def raw(lm: LanguageModel) -> dict[str, KVBlock]:
    return blocks_of(lm)


def assert_alike(ours: dict[str, PagedLayer], plain: dict[str, PagedLayer]) -> None:
    """All pages: values bit for bit, keys within roundings of one rotation."""
    for name, paged in ours.items():
        keys, values = paged.pages
        torch.testing.assert_close(keys, plain[name].pages[0], rtol=1e-6, atol=1e-6)
        assert torch.equal(values, plain[name].pages[1])


@pytest.mark.parametrize("card", [False, True])
@pytest.mark.parametrize("shard", [Shard(0, 1), Shard(1, 2)])
@pytest.mark.parametrize("codec", ["raw", "int8"])
def test_the_kernel_fills_pages_as_vllms_own_writer_does(lm, codec, shard, card):
    """Two requests, parts of their blocks, a rank's own heads; whatever else is on the pages stays."""
    ours, plain = (placed(lm, blocks_of(lm, codec), LOADS, shard, by_kernel=by, card=card) for by in (True, False))
    assert_alike(ours, plain)
    assert num_changed(lm, ours, shard, card=card) == 90


# The kernel alone, over pages in any order.
HEADS, FEW_PAGES, WIDTH = 3, 9, 16


def nan_pages(heads: int, page_tokens: int, order: str) -> tuple[Tensor, Tensor]:
    """Keys and values [heads, FEW_PAGES, page_tokens, WIDTH] that lie in this order, side by side (d2) or channel by
    channel (dn)."""
    sizes = {"h": heads, "b": FEW_PAGES, "n": page_tokens, "d": 2 * WIDTH}
    if order == "bhdn":
        keys, values = torch.full((FEW_PAGES, heads, 2, WIDTH * page_tokens), torch.nan).unbind(2)
        keys = keys.unflatten(2, (WIDTH, page_tokens)).transpose(2, 3)
        return keys.transpose(0, 1), values.unflatten(2, (page_tokens, WIDTH)).transpose(0, 1)
    whole = torch.full([sizes[letter] for letter in order], torch.nan)
    keys, values = whole.permute(*(order.index(letter) for letter in "hbnd")).chunk(2, dim=3)
    return keys, values


@pytest.mark.parametrize("codec", ["raw", "int8"])
@pytest.mark.parametrize("order", ["bhnd", "bnhd", "hbnd", "bhdn"])
@pytest.mark.parametrize("page_tokens", [16, 24])
def test_parts_of_blocks_go_to_their_slots_and_nowhere_else(order, page_tokens, codec):
    """A rank's heads, 1 and 2 of three, of tokens from the middle of blocks, over pages in no order."""
    from ragcache.fusion.place_kernel import PlaceKernel

    blocks = [coded(block_of(2, HEADS, tokens, WIDTH, WIDTH, torch.float32), codec) for tokens in (600, 40, 33)]
    parts_of = [(530, 50), (8, 32), (0, 1)]  # of int8, behind the first group of keys
    total = sum(count for _, count in parts_of)
    slots = torch.randperm(FEW_PAGES * page_tokens, generator=torch.Generator().manual_seed(1))[:total]
    pages = nan_pages(HEADS - 1, page_tokens, order)
    kernel = PlaceKernel.of(blocks, torch.device("cpu"), parts_of)
    assert_parts_placed(kernel, blocks, parts_of, pages, slots, 6, rtol=1e-6, atol=1e-5)


def test_pages_lie_as_vllm_says(lm):
    """[num_pages, num_kv_heads, page_tokens, 2 * head_dim], whatever its strides."""
    cache = torch.randn(5, PAGE_TOKENS, 2, 24).transpose(1, 2)
    keys, values = page_views(cache, by_channel=False)
    assert torch.equal(keys[1, 4, 7], cache[4, 1, 7, :12])
    assert torch.equal(values[1, 4, 7], cache[4, 1, 7, 12:])


# On a stream of its own.


class LoggedLane(LateLane):
    """A late lane over vLLM's pages that notes its calls. gate: what `finish` waits for"""

    def __init__(self, layers: dict[str, PagedLayer], gate: threading.Event | None = None) -> None:
        super().__init__()
        self.tensors = [paged.layer.kv_cache for paged in layers.values()]
        self.gate = gate
        self.log: list[str] = []
        self.arrivals: list[Callable[[], None]] = []

    def follow(self) -> None:
        self.log.append("follow")

    def drop_done(self) -> None:
        self.log.append("drop")

    def written_by(self, held: object) -> list[Tensor]:
        return self.tensors

    def run(self, work: Callable[[], None], held: object) -> Callable[[], None]:
        arrive = super().run(work, held)
        self.log.append("run")
        self.arrivals.append(lambda: (self.log.append("wait"), arrive()))
        return self.arrivals[-1]

    def finish(self) -> None:
        if self.gate is not None:
            self.gate.wait(60)
        for arrive in self.arrivals:
            arrive()


def arrived(layers: dict[str, PagedLayer]) -> list[bool]:
    return [not layers[f"layers.{index}"].layer.kv_cache.isnan().any() for index in range(NUM_LAYERS)]


def test_a_step_waits_for_each_layer_where_it_reaches_it(lm, raw):
    plain, layers = placed(lm, raw), paged_layers(lm)
    lane = LoggedLane(layers)
    side = worker(lm, raw, layers, lane=lane)
    side.begin(LOADS)
    assert arrived(layers) == [False, False, False]
    for index in range(NUM_LAYERS):
        side.place(f"layers.{index}")
        assert arrived(layers) == [number <= index for number in range(NUM_LAYERS)], "its own layer, and no other"
        side.place(f"layers.{index}")  # nothing more to wait for
    assert lane.log.count("wait") == NUM_LAYERS
    side.end()
    assert_alike(layers, plain)
    side.close()


def test_the_plain_way_goes_layer_by_layer_in_the_step(lm, raw):
    """The host waits for its copies: begun all at once, they would keep the model's first layer from starting."""
    plain, layers = placed(lm, raw), paged_layers(lm)
    before = layers["layers.1"].layer.kv_cache.clone()
    lane = LoggedLane(layers)
    side = worker(lm, raw, layers, lane=lane, by_kernel=False)
    side.begin(LOADS)
    side.place("layers.0")
    assert torch.equal(layers["layers.1"].layer.kv_cache, before)
    for index in (1, 2):
        side.place(f"layers.{index}")
    assert "run" not in lane.log
    assert_alike(layers, plain)
    side.close()


def test_the_stream_begins_behind_what_it_reads_and_overwrites(lm, raw, monkeypatch):
    """Pages may be read by the step before, and angles are looked up by the model's own stream."""
    layers = paged_layers(lm)
    lane = LoggedLane(layers)
    side = worker(lm, raw, layers, lane=lane)
    look_up = lm.rope.angles
    monkeypatch.setattr(lm.rope, "angles", lambda *where: (lane.log.append("angles"), look_up(*where))[1])
    side.begin(LOADS)
    assert lane.log[-NUM_LAYERS:] == ["run"] * NUM_LAYERS
    prepared = lane.log[:-NUM_LAYERS]
    assert prepared[-1] == "follow"
    assert "angles" in prepared
    side.end()
    assert arrived(layers) == [True, True, True], "a step that ends leaves no page behind that is not there"
    assert lane.log[-1] == "drop"
    side.close()


def test_a_load_ahead_has_ended_when_its_pages_are_there(lm, raw):
    plain, layers, gate = placed(lm, raw, LOADS[:1]), paged_layers(lm), threading.Event()
    ahead = Load("one", LOADS[0].stretches, LOADS[0].page_ids, [], 90, True)
    lane = LoggedLane(layers, gate)
    side = worker(lm, raw, layers, lane=lane)
    side.begin([ahead])
    until(lambda: lane.log.count("run") >= NUM_LAYERS)
    assert side.finished() == set()
    assert not any(arrived(layers))
    gate.set()
    until(lambda: side.finished() == {"one"})
    assert_alike(layers, plain)
    assert lane.log[:2] == ["drop", "follow"], "the model's stream, before the thread begins"
    side.close()


# Where the kernel cannot.


def test_a_refused_page_lock_is_named_once_and_costs_time_alone(lm, raw, monkeypatch, caplog):
    def refuse(tensor: Tensor, **where: object) -> Tensor:
        raise RuntimeError("CUDA error: OS call failed\nmore of it")

    monkeypatch.setattr(placing, "private_copy", refuse)
    plain, layers = placed(lm, raw), paged_layers(lm)
    side = worker(lm, raw, layers)
    with caplog.at_level(logging.WARNING):
        step(side)
        step(side)
    [record] = caplog.records
    assert record.getMessage().endswith("memory could not be page-locked: CUDA error: OS call failed")
    assert_same(layers, plain)
    side.close()


def test_blocks_that_it_cannot_read_go_the_plain_way(lm):
    blocks = blocks_of(lm, "int4")
    assert_same(placed(lm, blocks, by_kernel=True), placed(lm, blocks))


# Its first use.


@pytest.mark.parametrize("card", [False, True])
@pytest.mark.parametrize("shard", [Shard(0, 1), Shard(1, 2)])
def test_it_is_used_once_it_was_seen_to_be_right_and_pages_stay(lm, shard, card, caplog):
    layers = paged_layers(lm, shard.num_ranks, card=card)
    assert is_right(lm, layers, shard)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert_same(layers, paged_layers(lm, shard.num_ranks, card=card))


class Misread(PagedLayer):
    """A layer whose pages are taken for what they are not."""

    @property
    def pages(self) -> tuple[Tensor, Tensor]:
        return super().pages[::-1]


def test_what_is_wrong_is_named_once_and_it_is_not_used(lm, caplog, monkeypatch):
    from ragcache.fusion.place_kernel import PlaceKernel

    def said(layers: dict[str, PagedLayer]) -> str:
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert not is_right(lm, layers)
        [record] = caplog.records
        return record.getMessage()

    misread = {name: Misread(paged.index, paged.layer) for name, paged in paged_layers(lm).items()}
    assert "keys of layer 1 from raw are" in said(misread)
    half = paged_layers(lm)
    for paged in half.values():
        paged.layer.kv_cache = paged.layer.kv_cache.half()
    assert "pages hold torch.float16, not torch.float32" in said(half)
    assert "3 pages are too few" in said(paged_layers(lm, pages=3))
    right = PlaceKernel.place

    def late(self, layer, angles, keys, values, slots=None, own=0):
        right(self, layer, angles, keys, values, slots, own)
        if layer == 2:
            values[:, slots[-1] // PAGE_TOKENS, slots[-1] % PAGE_TOKENS] += 0.01

    monkeypatch.setattr(PlaceKernel, "place", late)
    assert "values of layer 2 from raw are 0.01 off" in said(paged_layers(lm))

    monkeypatch.setattr(PlaceKernel, "place", lambda *_: None)
    assert "are nan off" in said(paged_layers(lm))

    def broken(self, *args: object) -> None:
        raise RuntimeError("no ptxas here\nand more")

    monkeypatch.setattr(PlaceKernel, "place", broken)
    assert said(paged_layers(lm)).endswith("takes longer: RuntimeError: no ptxas here")


def test_other_pairings_go_the_plain_way(tmp_path: Path, caplog):
    other = load_tiny("cohere", tmp_path)[0]  # pairs dimensions side by side
    assert other.rope.angles(0, 0, 1).half is None
    assert not is_right(other, paged_layers(other))
    assert "does not pair the halves" in caplog.text


def test_positions_of_a_long_sequence_need_no_new_tables(lm, raw):
    """Tables that grow in the middle of a load would be written by one stream and read by another."""
    side = worker(lm, raw, paged_layers(lm))
    tables = {id(table.cos) for table in lm.rope._tables.values()}
    step(side)
    side.close()
    assert {id(table.cos) for table in lm.rope._tables.values()} == tables
    assert all(a.tokens.stop <= b.tokens.start for load in LOADS for a, b in pairwise(load.stretches))
