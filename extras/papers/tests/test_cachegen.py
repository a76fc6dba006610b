"""The entropy-coded codec against its formula in NumPy, decoded with nothing but zstandard."""

from typing import Any

import numpy as np
import pytest
import torch
import zstandard
from blocks import DTYPES

from ragcache.codecs import get_codec
from ragcache.codecs.layered import EncodedBlock
from ragcache.errors import DamagedBlockError
from ragcache.kv.block import KVBlock

Array = np.ndarray[Any, np.dtype[Any]]
CODEC = get_codec("cachegen")


def block_of(num_tokens: int, dtype: torch.dtype, *, layers: int = 6, dim: int = 8, drift: bool = False) -> KVBlock:
    """Channels of other means and deviations; with `drift` each token is near the one before."""
    rng = np.random.default_rng(num_tokens)
    parts = []
    for _ in range(2):
        noise = rng.standard_normal((layers, 2, num_tokens, dim))
        noise = noise.cumsum(2) if drift else noise
        parts.append(noise * rng.uniform(0.1, 3, (layers, 2, 1, dim)) + rng.uniform(-5, 5, (layers, 2, 1, dim)))
    return KVBlock(*(torch.from_numpy(one).to(dtype) for one in parts))


def decoded_by_hand(tensors: dict[str, torch.Tensor], part: str, shape: tuple[int, ...]) -> Array:
    """One number at a time: the code, plus its group's first where the channel is coded in differences."""
    own = {name.removeprefix(f"{part}."): one.numpy() for name, one in tensors.items() if name.startswith(part)}
    found, start = np.empty(shape), 0
    for layer, end in enumerate(own["ends"]):
        data = zstandard.ZstdDecompressor().decompress(own["stream"][start:end].tobytes())
        codes = np.frombuffer(data, dtype=np.int8).reshape(shape[1:])
        for head, token, channel in np.ndindex(*shape[1:]):
            code = int(codes[head, token, channel])
            if own["deltas"][layer, head, 0, channel] and token % 10:
                code = (code + int(codes[head, token - token % 10, channel]) + 128) % 256 - 128
            at = layer, head, 0, channel
            found[layer, head, token, channel] = code * np.float64(own["steps"][at]) + np.float64(own["means"][at])
        start = end
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("drift", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 10, 37])
def test_what_is_decoded_is_the_formula_on_the_stream(dtype: torch.dtype, drift: bool, num_tokens: int) -> None:
    block = block_of(num_tokens, dtype, drift=drift)
    tensors = CODEC.encode(block)
    decoded = CODEC.decode(tensors)
    assert bool(tensors["keys.deltas"].any()) or not drift or num_tokens < 20, "drifting channels become differences"
    for part, got in (("keys", decoded.keys), ("values", decoded.values)):
        expected = decoded_by_hand(tensors, part, tuple(got.shape))
        off = np.abs(got.double().numpy() - expected)
        assert np.all(off <= (float(torch.finfo(dtype).eps) / 2 + 2.0**-22) * np.abs(expected) + 1e-7)


def test_steps_are_shares_of_a_channels_deviation_and_coarser_in_later_layers() -> None:
    """0.3, 0.45 and 0.65 in the thirds, as far as 255 codes reach; rounded up to float16."""
    block = block_of(200, torch.float32)
    block.keys[0, 0, 7, 0] = 900.0
    tensors = CODEC.encode(block)
    numbers = block.keys.double().numpy()
    centred = numbers - tensors["keys.means"].double().numpy()
    share = np.array([0.3, 0.3, 0.45, 0.45, 0.65, 0.65])[:, None, None, None]
    deviation = np.sqrt((centred**2).mean(2, keepdims=True))
    expected = np.maximum(share * deviation, np.abs(centred).max(2, keepdims=True) / 127)
    steps = tensors["keys.steps"].double().numpy()
    assert np.all(steps >= expected * (1 - 1e-6))
    assert np.all(steps <= expected * (1 + 2.0**-9))
    assert steps[0, 0, 0, 0] > 6
    assert np.allclose(tensors["keys.means"].double().numpy(), numbers.mean(2, keepdims=True), rtol=1e-3, atol=1e-3)


def test_no_number_is_further_off_than_half_its_channels_step() -> None:
    block = block_of(77, torch.float32, drift=True)
    tensors = CODEC.encode(block)
    decoded = CODEC.decode(tensors)
    for part, got, given in (("keys", decoded.keys, block.keys), ("values", decoded.values, block.values)):
        off = (got - given).abs() / tensors[f"{part}.steps"].float()
        assert float(off.max()) <= 0.5 + 1e-3


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("num_tokens", [256, 300, 500])
def test_size_against_bfloat16(num_tokens: int, head_dim: int) -> None:
    """Normal numbers are the worst case: no other distribution of the same deviation has more entropy."""
    block = block_of(num_tokens, torch.bfloat16, dim=head_dim)
    encoded = CODEC.decode(CODEC.encode(block))
    assert isinstance(encoded, EncodedBlock)
    assert encoded.num_bytes <= 0.22 * block.num_bytes


def test_differences_make_drifting_blocks_smaller() -> None:
    still, drifting = (CODEC.decode(CODEC.encode(block_of(400, torch.bfloat16, dim=32, drift=d))) for d in (0, 1))
    assert drifting.num_bytes < still.num_bytes


def test_a_stream_that_was_written_wrong_is_damage() -> None:
    """Frames that hold something else are found at once, flipped bits in one at the latest when it is decoded."""
    tensors = CODEC.encode(block_of(37, torch.float32))
    stream, ends = tensors["keys.stream"], tensors["keys.ends"]
    other = torch.frombuffer(bytearray(zstandard.ZstdCompressor().compress(b"other")), dtype=torch.uint8)
    wrong = [
        {"keys.stream": stream[:-1]},
        {"keys.stream": torch.zeros_like(stream)},
        {"keys.stream": torch.cat([other, stream]), "keys.ends": ends + other.numel()},
        {"keys.ends": ends.flip(0)},
        {"keys.ends": ends - ends[-1]},
    ]
    for change in wrong:
        with pytest.raises(DamagedBlockError):
            CODEC.decode({**tensors, **change})
    refused = 0
    for position in range(int(ends[0])):
        flipped = stream.clone()
        flipped[position] ^= 16
        try:
            CODEC.decode({**tensors, "keys.stream": flipped}).layer_keys(0)
        except DamagedBlockError:
            refused += 1
    assert refused > 0, "and nothing else is raised, whichever bit it is"
