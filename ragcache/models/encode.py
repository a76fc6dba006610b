"""Encoding of chunks: they are read once, and their keys (before RoPE) and values are kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from ragcache.kv.block import KVBlock, empty_block
from ragcache.kv.cache_shape import CacheShape
from ragcache.kv.recurrent_block import HybridBlock
from ragcache.kv.rope import Rope
from ragcache.kv.state import State
from ragcache.models.attention import CURRENT, EncodePass
from ragcache.runtime import during


class AbandonedSignal(Exception):  # noqa: N818 - it ends a pass early; it is no error
    """A signal that the blocks are no longer wanted."""


class Recorder(Cache):  # type: ignore[misc]
    """A cache that writes every layer's keys and values directly into the blocks, without the padding.

    skips:  by row, how many first tokens are left out
    is_needed: called in every layer; AbandonedSignal is raised if it returns False
    """

    def __init__(
        self,
        lengths: Sequence[int],
        shape: CacheShape,
        skips: Sequence[int],
        is_needed: Callable[[], bool] | None = None,
    ) -> None:
        super().__init__(layers=[])
        self.shape = shape
        self.skips = skips
        self.is_needed = is_needed
        self.blocks = [empty_block(shape, length - skip) for length, skip in zip(lengths, skips, strict=True)]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        if self.is_needed is not None and not self.is_needed():
            raise AbandonedSignal
        layer_idx = self.shape.rank(layer_idx)
        keys, values = self.shape.in_order(layer_idx, (key_states, value_states))
        for row, (block, skip) in enumerate(zip(self.blocks, self.skips, strict=True)):
            kept = slice(skip, skip + block.num_tokens)
            block.layer_keys(layer_idx).copy_(keys[row, :, kept])
            block.layer_values(layer_idx).copy_(values[row, :, kept])
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0


@torch.inference_mode()
def encode_batch(
    model: PreTrainedModel,
    rope: Rope,
    shape: CacheShape,
    chunks: Sequence[Sequence[int]],
    prefix: Sequence[tuple[Tensor, Tensor]] = (),
    skips: Sequence[int] | None = None,
    is_needed: Callable[[], bool] | None = None,
    states: Sequence[State] = (),
) -> list[KVBlock]:
    """Encode right-padded chunks by a forward pass of the decoder, and return their blocks.

    The padding comes after every real token, so causal attention never sees it and needs no mask.

    prefix: rotated keys and values by layer, [1, num_kv_heads, prefix_tokens, head_dim], seen by every chunk; the
            chunks then have positions prefix_tokens, prefix_tokens + 1, ...
    skips:  by chunk, how many first tokens' KV is dropped (a lone BOS, neighbours); None: no tokens
    is_needed: called in every layer; AbandonedSignal is raised if it returns False
    states: of recurrent layers after the prefix; empty for no prefix
    """
    longest = max(len(chunk) for chunk in chunks)
    rows = [[*chunk, *([0] * (longest - len(chunk)))] for chunk in chunks]
    start = prefix[0][0].shape[2] if prefix else 0
    ids = torch.tensor(rows, device=shape.device)
    positions = torch.arange(start, start + longest, device=shape.device)[None]
    skips = skips or [0] * len(chunks)
    current = EncodePass(rope, list(prefix), states=states)
    if shape.states:
        current.lengths, current.maps = [len(chunk) for chunk in chunks], [[] for _ in chunks]
    recorder = Recorder([len(chunk) for chunk in chunks], shape, skips, is_needed)
    with during(CURRENT, current):  # the model without its head: encoding needs no logits
        model.base_model(input_ids=ids, position_ids=positions, past_key_values=recorder, use_cache=True)
    if shape.states:
        return [HybridBlock(kv, maps) for kv, maps in zip(recorder.blocks, current.maps, strict=True)]
    return recorder.blocks
