"""The kernel for bfloat16 on a CPU against softmax written out in NumPy, and PyTorch where it cannot be compiled."""

import logging

import numpy as np
import pytest
import torch

from ragcache import native
from ragcache.models import attention_on_cpu
from ragcache.models.attention import _attend_encoded
from ragcache.models.attention_kernels import Scoring, attend, attend_last, attend_part
from ragcache.models.attention_on_cpu import attend_on_cpu, prepare

needs_kernel = pytest.mark.skipif(
    prepare() is None, reason="the kernel needs AVX512-BF16 without AMX, and a C++ compiler"
)


def inputs(rows, length, heads=4, kv_heads=2, width=64):
    """Queries, keys and values in bfloat16; keys and values in buffers with room for nine more tokens."""
    generator = torch.Generator().manual_seed(rows * 1000 + length)
    shapes = ((1, heads, rows, width), (1, kv_heads, length + 9, width), (1, kv_heads, length + 9, width))
    query, key, value = (torch.randn(shape, generator=generator).bfloat16() for shape in shapes)
    return query, key[:, :, :length], value[:, :, :length]


def by_hand(query, key, value, num_own, scaling):
    query, key, value = (tensor[0].double().numpy() for tensor in (query, key, value))
    heads, rows, _ = query.shape
    out, lse = np.zeros((1, heads, rows, value.shape[-1])), np.zeros((1, heads, rows))
    for head, row in np.ndindex(heads, rows):
        kv_head = head // (heads // key.shape[0])
        seen = key.shape[1] - num_own + row + 1 if num_own else key.shape[1]
        scores = key[kv_head, :seen] @ query[head, row] * scaling
        weights = np.exp(scores - scores.max())
        out[0, head, row] = weights @ value[kv_head, :seen] / weights.sum()
        lse[0, head, row] = scores.max() + np.log(weights.sum())
    return out, lse


@needs_kernel
@torch.inference_mode()
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("rows", "length", "width"),
    [(1, 1, 64), (3, 3, 16), (2, 63, 48), (7, 64, 128), (5, 130, 80), (13, 511, 64), (1, 513, 96), (110, 1100, 64)],
)
def test_it_is_softmax(rows, length, width, causal):
    """Over blocks, pieces and tiles that are full, begun, and one token longer; scores large enough to matter."""
    query, key, value = inputs(rows, length, width=width)
    num_own = rows if causal else 0
    out, lse = attend_on_cpu(query, key, value, num_own, 0.4)
    expected, expected_lse = by_hand(query, key, value, num_own, 0.4)
    np.testing.assert_allclose(out.numpy(), expected, atol=0.012)  # weights are rounded to 8 bits
    np.testing.assert_allclose(lse.numpy(), expected_lse, atol=1e-4)


@needs_kernel
@torch.inference_mode()
def test_a_row_is_the_same_whoever_is_beside_it():
    query, key, value = inputs(40, 1300)
    together, lse = attend_on_cpu(query, key, value, 0, 0.2)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            assert torch.equal(attend_on_cpu(query, key, value, 0, 0.2)[0], together)
    finally:
        torch.set_num_threads(before)
    for row in (0, 17, 39):
        alone = attend_on_cpu(query[:, :, row : row + 1], key, value, 0, 0.2)
        assert torch.equal(alone[0], together[:, :, row : row + 1])
        assert torch.equal(alone[1], lse[:, :, row : row + 1])


@needs_kernel
@torch.inference_mode()
def test_a_batch_is_its_rows():
    """Also of keys that are no single tensor's rows, which the kernel does not take."""
    rows = [inputs(5, 90) for _ in range(2)]
    rows[1] = [tensor.flip(2) for tensor in rows[1]]
    together = [torch.cat(tensors) for tensors in zip(*rows, strict=True)]
    found, lse = attend_on_cpu(*together, 5, 0.2)
    for number, row in enumerate(rows):
        alone = attend_on_cpu(*(tensor.contiguous() for tensor in row), 5, 0.2)
        assert torch.equal(found[number], alone[0][0])
        assert torch.equal(lse[number], alone[1][0])
    query, key, value = together
    assert attend_on_cpu(query, key.transpose(1, 2).contiguous().transpose(1, 2), value, 5, 0.2) is None
    assert attend_on_cpu(query, torch.cat([key, key], 1)[:, :2], value, 5, 0.2) is None


@needs_kernel
@torch.inference_mode()
def test_every_unmasked_path_takes_it(monkeypatch):
    """Attention to all keys, by parts, over a cache's end, after a prefix, and from the first token on."""
    query, key, value = inputs(4, 30)
    taken = []
    kernel = attention_on_cpu.prepare().ragcache_attend
    counted = type("Counted", (), {"ragcache_attend": lambda *given: (taken.append(given[7]), kernel(*given[1:]))})
    monkeypatch.setattr(attention_on_cpu, "prepare", lambda: counted())
    scoring = Scoring(0.3)
    own = key[:, :, :4], value[:, :, :4]
    for found, (keys, values), num_own in (
        (attend(query, key, value, None, False, scoring), (key, value), 0),
        (attend_part(query, key, value, False, scoring).out, (key, value), 0),
        (attend_last(query, key, value, scoring).out, (key, value), 4),
        (_attend_encoded(query, key, value, None, scoring), (key, value), 4),
        (attend(query, *own, None, True, scoring), own, 4),
    ):
        expected = by_hand(query, keys, values, num_own, 0.3)[0]
        np.testing.assert_allclose(found.float().numpy(), expected, atol=0.02)
    assert len(taken) == 5
    attend(query.float(), key.float(), value.float(), None, False, scoring)
    with torch.inference_mode(False), torch.enable_grad():
        attend_part(query, key, value, False, scoring)
    assert len(taken) == 5, "float32 and training are PyTorch's"


def test_without_a_compiler_pytorch_computes(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with caplog.at_level(logging.INFO, "ragcache.native"):
        assert native.load.__wrapped__("attention") is None
    assert "attention is computed by PyTorch" in caplog.text
    assert "no-such-compiler" in caplog.text
    monkeypatch.setattr(attention_on_cpu, "prepare", lambda: None)
    query, key, value = inputs(3, 70)
    with torch.inference_mode():
        found = attend(query, key, value, None, False, Scoring(0.3)).float()
    np.testing.assert_allclose(found.numpy(), by_hand(query, key, value, 0, 0.3)[0], atol=0.02)


@needs_kernel
def test_a_library_is_compiled_once(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    flags = attention_on_cpu._INSTRUCTIONS
    assert native.load.__wrapped__("attention", *flags) is not None
    (made,) = (tmp_path / "ragcache" / "native").iterdir()
    written = made.stat().st_mtime_ns
    assert native.load.__wrapped__("attention", *flags) is not None
    assert made.stat().st_mtime_ns == written
    damaged = tmp_path / "damaged" / made.relative_to(tmp_path)
    damaged.parent.mkdir(parents=True)
    damaged.write_bytes(b"no library")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "damaged"))
    assert native.load.__wrapped__("attention", *flags) is None, "a damaged file is no library"
