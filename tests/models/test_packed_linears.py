"""Packed linear layers: the same answers as transformers gives, and nothing else about the model changes."""

import copy

import pytest
import torch
from families import assert_same, causal_logits, ids_of, saved_tiny, tiny
from torch import nn

import ragcache as rc
from ragcache.models.packed import PackedLinear, can_pack

pytestmark = pytest.mark.skipif(
    not can_pack(nn.Linear(1, 1)), reason="PyTorch has no packed weights on this machine: every layer stays plain"
)


def layers_of(lm):
    return [layer for layer in lm.model.modules() if isinstance(layer, nn.Linear)]


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_neox", "phi3", "qwen2"])
def test_packed_layers_answer_as_transformers_does(family):
    lm, oracle = tiny(family)
    assert all(type(layer) is PackedLinear for layer in layers_of(lm))
    ids = ids_of(40)
    cache = lm.new_cache(40)
    for start, end in ((0, 30), (30, 39), (39, 40)):  # a long pass, a short one, and one row
        logits = lm.run(ids[start:end], start, cache)
        assert_same(logits, causal_logits(oracle, ids[:end]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1, 24), (1, 5, 24), (2, 3, 24), (1, 200, 24), (1, 0, 24)])
@pytest.mark.parametrize("bias", [False, True])
def test_a_packed_layer_multiplies_as_numbers_do(dtype, shape, bias):
    torch.manual_seed(0)
    layer = nn.Linear(24, 17, bias=bias, dtype=dtype)
    if not can_pack(layer):
        pytest.skip(f"no packed weights in {dtype} on this machine")
    PackedLinear.take_over(layer)
    rows = torch.randn(shape, dtype=dtype)
    exact = rows.double() @ layer.weight.double().T + (layer.bias.double() if bias else 0)
    with torch.inference_mode():
        found = layer(rows)
    assert found.shape == (*shape[:-1], 17)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), exact.detach(), rtol=0, atol=8 * torch.finfo(dtype).eps)


def test_packing_can_be_refused_and_is_not_part_of_the_model():
    saved = saved_tiny("llama")
    plain, packed = rc.load_lm(saved, packed=False), rc.load_lm(saved, packed=True)
    assert not any(isinstance(layer, PackedLinear) for layer in layers_of(plain))
    assert packed.fingerprint == plain.fingerprint
    assert packed.model.state_dict().keys() == plain.model.state_dict().keys()


def test_what_does_not_fit_the_memory_stays_plain(monkeypatch):
    saved = saved_tiny("llama")
    monkeypatch.setattr("ragcache.models.packed.machine_bytes", lambda: 1000)
    assert not any(isinstance(layer, PackedLinear) for layer in layers_of(rc.load_lm(saved)))
    assert all(isinstance(layer, PackedLinear) for layer in layers_of(rc.load_lm(saved, packed=True)))


def test_a_copy_and_a_gradient_use_the_weight_itself():
    layer = nn.Linear(24, 17)
    PackedLinear.take_over(layer)
    rows = torch.randn(8, 24)
    layer(rows).sum().backward()
    torch.testing.assert_close(layer.weight.grad, rows.sum(0).expand(17, 24))
    copied = copy.deepcopy(layer)
    with torch.inference_mode():
        copied.weight.mul_(2)
        copied.bias.zero_()
        torch.testing.assert_close(copied(rows), rows @ (2 * layer.weight).T)
