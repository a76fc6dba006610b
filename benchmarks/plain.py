"""The baselines: code that a user of transformers alone would run. Nothing of ragcache runs here."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

KV = list[tuple[Tensor, Tensor]]


@torch.inference_mode()
def full_prefill(model: PreTrainedModel, ids: Sequence[int]) -> Tensor:
    """Read the whole prompt in a pass, filling the cache for decoding. Returns last logits, float32 [vocab_size]."""
    batch = torch.tensor([list(ids)], device=model.device)
    cache = DynamicCache(config=model.config)
    return _last(model(input_ids=batch, past_key_values=cache, use_cache=True, logits_to_keep=1).logits)


@torch.inference_mode()
def block_diagonal_prefill(model: PreTrainedModel, chunks: Sequence[Sequence[int]], suffix: Sequence[int]) -> Tensor:
    """Run a pass under an explicit mask: chunks see only themselves, the suffix sees everything.

    This is the required result of repositioned blocks. Returns the last logits, float32 [vocab_size].
    """
    parts = [*chunks, suffix]
    counts = torch.tensor([len(part) for part in parts], device=model.device)
    owner = torch.repeat_interleave(torch.arange(len(parts), device=model.device), counts)
    seen = (owner[:, None] == owner[None]) | (owner == len(chunks))[:, None]
    hidden = ~seen.tril_()
    mask = torch.zeros(hidden.shape, dtype=model.dtype, device=model.device)
    mask.masked_fill_(hidden, torch.finfo(model.dtype).min)
    ids = torch.tensor([[token for part in parts for token in part]], device=model.device)
    return _last(model(input_ids=ids, attention_mask=mask[None, None], use_cache=False, logits_to_keep=1).logits)


@torch.inference_mode()
def suffix_over(model: PreTrainedModel, ids: Sequence[int], cache: DynamicCache) -> Tensor:
    """Run the suffix over a full cache: transformers' own reuse. Returns the last logits, float32 [vocab_size]."""
    batch = torch.tensor([list(ids)], device=model.device)
    return _last(model(input_ids=batch, past_key_values=cache, use_cache=True, logits_to_keep=1).logits)


@torch.inference_mode()
def filled_cache(layers: KV) -> DynamicCache:
    """Return a DynamicCache with copies of rotated KV, [1, num_kv_heads, num_tokens, head_dim] per layer."""
    cache = DynamicCache()
    for layer, (keys, values) in enumerate(layers):
        cache.update(keys.clone(), values.clone(), layer)
    return cache


def generate(
    model: PreTrainedModel, ids: Sequence[int], cache: DynamicCache, count: int
) -> tuple[list[int], list[float]]:
    """Generate `count` greedy tokens after ids, of which the cache holds all but the last.

    Returns token ids and, for each, seconds since the call (time.perf_counter).
    """
    batch = torch.tensor([list(ids)], device=model.device)
    clock = Clock()
    out = model.generate(
        batch,
        attention_mask=torch.ones_like(batch),
        past_key_values=cache,
        max_new_tokens=count,
        do_sample=False,
        streamer=clock,
    )
    return out[0, batch.shape[1] :].tolist(), clock.seconds


@torch.inference_mode()
def read_chunks(model: PreTrainedModel, chunks: Sequence[Sequence[int]], batch_chunks: int) -> None:
    """Run the decoder without its head over right-padded batches, long chunks together; keys and values are dropped.

    Causal attention needs no mask of padding on the right.
    """
    ordered = sorted(chunks, key=len, reverse=True)
    for start in range(0, len(ordered), batch_chunks):
        rows = ordered[start : start + batch_chunks]
        longest = len(rows[0])
        ids = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], device=model.device)
        model.base_model(input_ids=ids, attention_mask=None, use_cache=False)


class Clock(BaseStreamer):  # type: ignore[misc]
    """A streamer that records when tokens arrive. The first call of `put` is for the prompt."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self._stamps: list[float] = []

    def put(self, value: Tensor) -> None:
        self._stamps.append(time.perf_counter() - self.started)

    def end(self) -> None:
        return

    @property
    def seconds(self) -> list[float]:
        return self._stamps[1:]


def _last(logits: Tensor) -> Tensor:
    return logits[0, -1].float()
