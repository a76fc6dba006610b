"""The placing kernel, in Triton's interpreter, against NumPy; and the lane on which layers are placed ahead."""

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import forked
import numpy as np
import pytest
import torch
from covering import covering
from families import assert_same, block_diagonal, load_tiny, oracle_logits, random_prompt
from late_lane import LateLane
from placed_oracle import AT, angles_at, coded, random_block, turned
from torch import Tensor

import ragcache as rc
from ragcache.fusion import place_check
from ragcache.fusion.method import Placer
from ragcache.kv.block import KVBlock, MixedBlock, part_of_block
from ragcache.models.language_model import LanguageModel

triton = pytest.importorskip("triton", reason="the kernel's tests need Triton")


@pytest.fixture(scope="module")
def kernel() -> Iterator[type]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")  # read where a kernel is defined, and where it is launched
        from ragcache.fusion.place_kernel import PlaceKernel

        yield PlaceKernel


def placed(kernel: type, blocks: list[KVBlock], layer: int, half: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    total = sum(block.num_tokens for block in blocks)
    shape = blocks[0].layers[layer]
    room = [torch.full((shape.num_kv_heads, total + 9, width), 77.0, dtype=dtype) for width in shape[1:]]
    keys, values = (one[:, 4 : 4 + total] for one in room)  # a part of a larger buffer, as in a cache
    kernel.of(blocks, torch.device("cpu")).place(layer, angles_at(AT, total, half), keys, values)
    for one in room:
        beside = torch.cat([one[:, :4], one[:, 4 + total :]], 1)
        assert (beside == 77).all()
    return keys, values


@pytest.mark.parametrize(
    ("widths", "dtype"), covering([(16, 8), (24, 8), (16, 0), (24, 12)], [torch.float32, torch.bfloat16, torch.float16])
)
def test_blocks_stand_rotated_one_behind_the_other(kernel, widths, dtype):
    key_dim, half = widths
    blocks = [random_block(3, 2, tokens, key_dim, 16, dtype) for tokens in (1, 70, 32)]
    for layer in range(3):
        keys, values = placed(kernel, blocks, layer, half, dtype)
        plain = np.concatenate([block.keys[layer].double().numpy() for block in blocks], 1)
        steps = 2 * torch.finfo(dtype).eps
        np.testing.assert_allclose(keys.double().numpy(), turned(plain, AT, half), rtol=steps, atol=3 * steps)
        assert torch.equal(values, torch.cat([block.values[layer] for block in blocks], 1))


@pytest.mark.parametrize(
    ("value_dim", "tokens", "groups"), [(160, (600, 33), 2), (16, (40, 33), 1)], ids=["two groups", "one group"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_codes_are_decoded_on_the_way_to_the_same_bits(kernel, dtype, value_dim, tokens, groups):
    blocks = [coded(random_block(2, 2, count, 16, value_dim, dtype), "int8") for count in tokens]
    assert blocks[0].part("keys")["scales"].shape[2] == groups == blocks[0].part("values")["scales"].shape[3]
    keys, values = placed(kernel, blocks, 1, 0, dtype)
    assert torch.equal(keys, torch.cat([block.layer_keys(1) for block in blocks], 1))
    assert torch.equal(values, torch.cat([block.layer_values(1) for block in blocks], 1))


def test_plain_and_encoded_blocks_of_one_prompt(kernel):
    plain = [random_block(2, 2, tokens, 16, 16, torch.float32) for tokens in (5, 40, 7)]
    blocks = [plain[0], coded(plain[1], "int8"), plain[2]]
    keys, values = placed(kernel, blocks, 1, 8, torch.float32)
    expected = np.concatenate([block.layer_keys(1).double().numpy() for block in blocks], 1)
    np.testing.assert_allclose(keys.double().numpy(), turned(expected, AT, 8), atol=1e-5)
    assert torch.equal(values, torch.cat([block.layer_values(1) for block in blocks], 1))


def test_layers_that_differ_and_parts_of_blocks(kernel):
    wide, narrow = random_block(2, 1, 50, 32, 32, torch.float32), random_block(1, 2, 50, 16, 16, torch.float32)
    mixed = part_of_block(MixedBlock([wide, narrow], [0, 1, 0]), 20, 45)
    for layer, half in ((0, 16), (1, 8), (2, 16)):
        keys, values = placed(kernel, [mixed, mixed], layer, half, torch.float32)
        expected = np.concatenate([mixed.layer_keys(layer).double().numpy()] * 2, 1)
        np.testing.assert_allclose(keys.double().numpy(), turned(expected, AT, half), atol=1e-5)
        assert torch.equal(values, torch.cat([mixed.layer_values(layer)] * 2, 1))


def test_what_it_cannot_read_is_left_to_the_plain_way(kernel):
    device = torch.device("cpu")
    block = random_block(2, 2, 40, 16, 16, torch.float32)
    assert kernel.of([block], device) is not None
    assert kernel.of([block, coded(block, "int4")], device) is None
    assert kernel.of([KVBlock(block.keys.transpose(1, 2).contiguous().transpose(1, 2), block.values)], device) is None
    odd = random_block(2, 2, 5, 3, 3, torch.float16)
    assert kernel.of([odd], device) is None  # a layer would begin where no whole load does
    assert kernel.of([block], torch.device("meta")) is None  # of another device, and not page-locked


SOURCES = [("float32", 16), ("bfloat16", 0), ("uint8", 16)]


def test_it_compiles_for_a_card_that_is_not_here():
    """To a Hopper's machine code, in another process: here kernels are interpreted. It stores 16 bytes at once."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["TRITON_DEFAULT_FP_FUSION"] = "1"  # what is the default may change
    made = forked.run(COMPILE, *(part for case in SOURCES for part in case), env=env)
    if "ptxas" in made.stderr and "No such file" in made.stderr:
        pytest.skip("this Triton comes without an assembler")
    assert made.returncode == 0, made.stderr
    found = [tuple(map(int, line.split())) for line in made.stdout.splitlines()]
    assert len(found) == len(SOURCES)
    for case, (stores, wide) in zip(SOURCES, found, strict=True):
        assert stores == wide > 0, case


COMPILE = """
import sys
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from ragcache.fusion.place_kernel import _TYPES, _place

of = dict.fromkeys(("table", "spans", "slots"), "*i64") | dict.fromkeys(("cos", "sin"), "*fp32")
of |= dict.fromkeys(("keys", "values"), "*bf16") | dict.fromkeys(("layer", "first_head"), "i32")
for source, page in zip(sys.argv[1::2], sys.argv[2::2]):
    fixed = dict(
        PAGE=int(page), VALUE_SIZE=64, KEY_DIM=128, VALUE_DIM=128, HALF=64, SOURCE=_TYPES[getattr(torch, source)],
        DTYPE=tl.bfloat16, ROWS=32, HALF_WIDTH=64, REST_WIDTH=1, VALUE_WIDTH=128, key_column=1, value_column=1,
    )
    signature = {name: "constexpr" if name in fixed else of.get(name, "i64") for name in _place.arg_names}
    even = [rank for rank, name in enumerate(_place.arg_names) if name not in (*fixed, "layer", "first_head")]
    attributes = {(rank,): [["tt.divisibility", 16]] for rank in even}
    made = triton.compile(ASTSource(_place, signature, fixed, attributes), target=GPUTarget("cuda", 90, 32))
    assert made.asm["cubin"]
    print(made.asm["ptx"].count("st.global"), made.asm["ptx"].count("st.global.v4.b32"))
"""


# In a model.


@pytest.fixture
def tiny(tmp_path: Path) -> LanguageModel:
    return load_tiny("llama", tmp_path)[0]


def test_a_model_uses_it_once_it_was_seen_to_be_right(kernel, tiny, caplog):
    blocks = [random_block(3, 2, 40, 12, 12, torch.float32)]
    assert place_check.place_kernel(tiny, blocks) is not None
    assert not caplog.records


def test_a_kernel_that_is_wrong_is_named_once_and_not_used(kernel, tiny, caplog, monkeypatch):
    right = kernel.place

    def wrong(self, layer, angles, keys, values):
        right(self, layer, angles, keys, values)
        values[0, 38] += 0.01

    monkeypatch.setattr(kernel, "place", wrong)
    blocks = [random_block(3, 2, 40, 12, 12, torch.float32)]
    with caplog.at_level(logging.WARNING):
        assert [place_check.place_kernel(tiny, blocks) for _ in range(3)] == [None] * 3
    [record] = caplog.records
    assert "values of layer 0 from raw are 0.01 off" in record.getMessage()


def test_a_kernel_that_does_not_compile_is_named_once(kernel, tiny, caplog, monkeypatch):
    def broken(self, layer, angles, keys, values):
        raise RuntimeError("no ptxas here\nand more")

    monkeypatch.setattr(kernel, "place", broken)
    with caplog.at_level(logging.WARNING):
        assert place_check.place_kernel(tiny, []) is None
    assert caplog.records[0].getMessage().endswith("takes longer on a GPU: RuntimeError: no ptxas here")


def test_it_is_switched_off_by_name(kernel, tiny, monkeypatch):
    monkeypatch.setenv("RAGCACHE_PLACE", "plain")
    assert place_check.place_kernel(tiny, [random_block(3, 2, 40, 12, 12, torch.float32)]) is None


@pytest.mark.parametrize(("method", "family"), covering(["reposition", "cacheblend"], ["llama", "gemma2", "smollm3"]))
def test_a_pass_waits_for_each_layer_that_was_placed_ahead(tmp_path, family, method):
    lm, model = load_tiny(family, tmp_path)
    prompt = random_prompt()
    plain = rc.fuse(lm, prompt, method).next_logits
    lm.pool.lane = lane = LateLane()
    found = rc.fuse(lm, prompt, method).next_logits
    assert torch.equal(found, plain)
    assert lane.waited >= lm.shape.num_layers
    if method == "reposition":
        assert_same(found, oracle_logits(model, prompt, block_diagonal(prompt)))


def test_what_is_moved_or_shared_was_waited_for(tiny):
    block = random_block(3, 2, 9, 12, 12, torch.float32)
    placer = Placer(tiny, [(block, 0)])
    plain = tiny.new_cache(9, placer.place)
    plain.place()
    tiny.pool.lane = LateLane()
    late = tiny.new_cache(9, placer.place)
    late.own_state(0)  # places all, waits for one
    late.make_room(5000)  # to larger buffers
    for layer in range(3):
        for ours, theirs in zip(late.layer_state(layer), plain.layer_state(layer), strict=True):
            assert torch.equal(ours, theirs)
