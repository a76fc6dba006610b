"""The check that decides whether a Triton kernel places a model's blocks.

The kernel is used only if, on random passages, it gives the same result as the PyTorch operations of `Placer`.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from ragcache.codecs import get_codec
from ragcache.errors import first_line
from ragcache.kv.block import KVBlock, empty_block
from ragcache.lazy_torch import Tensor, torch

if TYPE_CHECKING:
    from ragcache.fusion.place_kernel import PlaceKernel
    from ragcache.kv.cache_shape import CacheShape
    from ragcache.kv.fused_cache import FusedCache
    from ragcache.kv.rope import Angles
    from ragcache.models.language_model import LanguageModel

log = logging.getLogger(__name__)
SWITCH = "RAGCACHE_PLACE"
"""Environment variable; the value `plain` turns the kernel off."""
INTERPRET = "TRITON_INTERPRET"  # Triton's variable: kernels run on a CPU, slowly, for tests
TOKENS = (40, 8)  # of the probe's two passages: more than a tile, and less than a tile
AT = 3  # position of the probe's first token
CODECS = ("raw", "int8")

_checked: WeakKeyDictionary[LanguageModel, bool] = WeakKeyDictionary()
_lock = threading.Lock()


def place_kernel(lm: LanguageModel, blocks: Sequence[KVBlock]) -> PlaceKernel | None:
    """Return the kernel over these blocks, or None if `Placer` has to place them by PyTorch's operations.

    None: the kernel cannot read a block or does not know the model's rotation, is switched off, does not run on this
    device, or gave another result than PyTorch when the model first placed blocks.
    """
    with _lock:
        if lm not in _checked:
            _checked[lm] = _is_right(lm)
    if not _checked[lm]:
        return None
    from ragcache.fusion.place_kernel import PlaceKernel

    return PlaceKernel.of(blocks, lm.device)


def runs_on(device: torch.device) -> bool:
    """Return whether the kernel is not switched off and the device has CUDA, or Triton's interpreter is on."""
    return os.environ.get(SWITCH) != "plain" and (device.type == "cuda" or os.environ.get(INTERPRET) == "1")


def _is_right(lm: LanguageModel) -> bool:
    """Return whether the kernel places the model's KV as PyTorch does. If so, on CUDA, open the pool's lane."""
    if not runs_on(lm.device):
        return False
    angles = [lm.rope.angles(layer, AT, sum(TOKENS)) for layer in range(lm.shape.num_layers)]
    if any(angle is not None and angle.half is None for angle in angles):
        return False
    try:
        if lm.device.type == "cuda":
            from ragcache.kv.lane import Lane

            lm.pool.lane = Lane(lm.device)
        for codec in CODECS:
            _compare(lm, codec, angles)
    except Exception as error:
        lm.pool.lane = None
        why = f"{type(error).__name__}: {first_line(error)}"
        log.warning("passages are placed without the kernel, which takes longer on a GPU: %s", why)
        return False
    return True


def _compare(lm: LanguageModel, codec: str, angles: Sequence[Angles | None]) -> None:
    """Place random passages by the kernel and by PyTorch's operations.

    Raises ArithmeticError if the results differ by more than rounding.
    """
    from ragcache.fusion.place_kernel import PlaceKernel

    blocks = [random_block(lm.shape, codec, count) for count in TOKENS]
    if (kernel := PlaceKernel.of(blocks, lm.device)) is None:
        raise ArithmeticError(f"{codec} blocks cannot be read by their addresses")
    positions = torch.arange(AT, AT + sum(TOKENS), device=lm.device)

    def place(cache: FusedCache, layer: int) -> None:
        keys, values = cache.reserve(layer, positions)
        kernel.place(layer, angles[layer], keys[0], values[0])

    cache = lm.new_cache(sum(TOKENS), place)
    for layer in range(lm.shape.num_layers):
        parts = [(block.layer_keys(layer), block.layer_values(layer)) for block in blocks]
        keys, values = (torch.cat(part, dim=1).to(lm.device, lm.dtype) for part in zip(*parts, strict=True))
        keys = lm.rope.turn(keys[None], angles[layer], torch.empty_like(keys[None]))[0]
        for name, ours, plain in zip(("keys", "values"), cache.layer_state(layer), (keys, values), strict=False):
            check_close(f"{name} of layer {layer} from {codec}", ours[0], plain)
    cache.release()


def check_close(name: str, ours: Tensor, plain: Tensor) -> None:
    """Raise ArithmeticError if the two tensors differ by more than rounding."""
    bound = 2 * torch.finfo(plain.dtype).eps * float(plain.float().abs().max())
    far = float((ours.float() - plain.float()).abs().max())
    if not far <= bound:
        raise ArithmeticError(f"{name} are {far:.3g} off, more than {bound:.3g}")


def random_block(shape: CacheShape, codec: str, num_tokens: int) -> KVBlock:
    """Return a block of random numbers, held like the blocks that are placed (page-locked memory for a GPU)."""
    block = empty_block(replace(shape, device=torch.device("cpu")), num_tokens)
    generator = torch.Generator().manual_seed(num_tokens)
    for layer in range(shape.num_layers):
        for part in (block.layer_keys(layer), block.layer_values(layer)):
            part.copy_(torch.randn(part.shape, generator=generator))
    held = get_codec(codec).decode(get_codec(codec).encode(block))
    return held.map(lambda tensor: tensor.pin_memory() if shape.device.type == "cuda" else tensor)
