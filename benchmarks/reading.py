"""A prompt, and all timed ways to read it."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Self

import torch
from torch import Tensor
from transformers import DynamicCache

from benchmarks import plain
from benchmarks.files import device_read_bytes, drop_page_cache, fresh_kv_store, read_blocks
from benchmarks.shapes import Built
from ragcache.engine.loader import BlockLoader
from ragcache.errors import MissingBlockError, RagCacheError
from ragcache.fusion.fuse import FuseOutput, fuse
from ragcache.fusion.method import Placer
from ragcache.ingest.encoder import ModelEncoder
from ragcache.kv.block import KVBlock
from ragcache.kv.fused_cache import FusedCache
from ragcache.prompt import Prompt
from ragcache.store.counters import Loaded
from ragcache_papers.kvtc_fit import stand_in


def random_prompt(vocab_size: int, passages: int, tokens: int, suffix: int, seed: int) -> Prompt:
    """Return a prompt of random tokens: the time to read it does not depend on the ids."""
    generator = torch.Generator().manual_seed(seed)
    drawn: list[int] = torch.randint(vocab_size, (passages * tokens + suffix,), generator=generator).tolist()
    ends = range(tokens, passages * tokens + 1, tokens)
    return Prompt(prefix_ids=[], chunk_ids=[drawn[end - tokens : end] for end in ends], suffix_ids=drawn[-suffix:])


def truncate(cache: FusedCache, num_tokens: int) -> None:
    """Drop the tokens after the first `num_tokens` of every layer; the kept tokens are not moved."""
    cache.lengths = [min(length, num_tokens) for length in cache.lengths]


class Bench:
    """Blocks of a prompt, in every tier that they are read from.

    Every way to read returns the first token, so that the time ends when the token is known on the host.
    """

    def __init__(
        self, built: Built, passages: int, tokens: int, suffix: int, root: Path, seed: int, codec: str = "raw"
    ) -> None:
        self.lm, self.plain = built
        self.prompt = random_prompt(self.lm.vocab_size, passages, tokens, suffix, seed)
        self._encoder = ModelEncoder(self.lm)
        self._root = root
        self._codec = codec
        self._basis: str | None = None
        blocks = self._encoder.encode(self.prompt.chunk_ids)
        self.num_bytes = sum(block.num_bytes for block in blocks)
        self._budget = 2 * self.num_bytes
        with fresh_kv_store(root, 0, codec) as store:
            if store.lacks_basis:
                self._basis = store.add_basis(stand_in(blocks[0]))
        self._loader = self._open_store()
        for ids, block in zip(self.prompt.chunk_ids, blocks, strict=True):
            self._loader.kv.put(self._encoder.key(ids), block)
        self.on_device = blocks
        self.in_hand = in_hand(blocks, self.lm.device)
        self._disk = self._open_store()
        self.cold_read_bytes: int | None = None
        # The floor's cache is made by the method that is compared with the floor.
        self._context = fuse(self.lm, self.prompt, "reposition", self.in_hand, reserve_tokens=0).cache
        # The cache that an earlier question over the same passages left.
        self._earlier = fuse(self.lm, self.prompt, "reposition", self.in_hand, reserve_tokens=0).share()
        self._plain_cache = DynamicCache()
        self._logits = self.floor_logits()

    # Blocks

    def load_memory(self) -> list[KVBlock]:
        return _blocks(read_blocks(self._loader, self._keys()))

    def load_disk(self) -> list[KVBlock]:
        """Return blocks read from disk, as at the first use after a start; this fills the store's memory tier, too."""
        before = device_read_bytes()
        blocks = _blocks(read_blocks(self._disk, self._keys()))
        if before is not None:
            self.cold_read_bytes = max(self.cold_read_bytes or 0, (device_read_bytes() or 0) - before)
        return blocks

    def forget_memory(self) -> None:
        _close(self._disk)
        self._disk = self._open_store()

    def forget_all(self) -> None:
        self.forget_memory()
        gc.collect()  # a mapped page stays in the page cache
        drop_page_cache(self._root)

    def _open_store(self) -> BlockLoader:
        """Open the store as the engine does: its memory tier is page-locked if the model is on a GPU."""
        store = fresh_kv_store(self._root, self._budget, self._codec, self._basis)
        store.use_device(self.lm.device)
        return BlockLoader(store)

    def _keys(self) -> list[str]:
        return [self._encoder.key(ids) for ids in self.prompt.chunk_ids]

    # Phases

    def place(self) -> FusedCache:
        """Place every layer's blocks, rotated and copied into a cache, without running a model."""
        ends = list(accumulate(block.num_tokens for block in self.in_hand))
        pairs = zip(self.in_hand, [0, *ends], strict=False)
        placer = Placer(self.lm, list(pairs))
        cache = self.lm.new_cache(self.prompt.num_tokens)
        with torch.inference_mode():
            for layer in range(self.lm.shape.num_layers):
                placer.place(cache, layer)
        return cache

    def choose_token(self) -> int:
        return int(self._logits.argmax())

    def floor_logits(self) -> Tensor:
        """Run the suffix over KV that is already placed: no method can be faster."""
        truncate(self._context, self.prompt.context_tokens)
        return self.lm.run(self.prompt.suffix_ids, self.prompt.context_tokens, self._context)

    def floor(self) -> int:
        return int(self.floor_logits().argmax())

    # Whole prefills

    def reposition(self, blocks: list[KVBlock]) -> int:
        return first_token(fuse(self.lm, self.prompt, "reposition", blocks, reserve_tokens=0))

    def reposition_again(self) -> int:
        return first_token(self.over_earlier())

    def over_earlier(self) -> FuseOutput:
        """Read another question over passages that an earlier question has placed."""
        return fuse(self.lm, self.prompt, "reposition", base=self._earlier, reserve_tokens=0)

    def full(self) -> int:
        return first_token(fuse(self.lm, self.prompt, "full", reserve_tokens=0))

    # Plain transformers

    def fill_plain_cache(self) -> None:
        truncate(self._context, self.prompt.context_tokens)
        layers = [self._context.layer_state(layer)[:2] for layer in range(self.lm.shape.num_layers)]
        self._plain_cache = plain.filled_cache(layers)

    def plain_reuse_logits(self) -> Tensor:
        """Return the logits of transformers over its own cache. Call it once for every call of `fill_plain_cache`."""
        return plain.suffix_over(self.plain, self.prompt.suffix_ids, self._plain_cache)

    def plain_reuse(self) -> int:
        return int(self.plain_reuse_logits().argmax())

    def plain_full(self) -> int:
        return int(plain.full_prefill(self.plain, self.prompt.ids).argmax())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        _close(self._loader)
        _close(self._disk)


def agreement(bench: Bench) -> dict[str, float]:
    """Return the distance of each timed way's logits from plain transformers'. Raises RagCacheError as `checked`."""
    prompt = bench.prompt
    masked = plain.block_diagonal_prefill(bench.plain, prompt.chunk_ids, prompt.suffix_ids)
    bench.fill_plain_cache()
    reused = bench.plain_reuse_logits()
    read = plain.full_prefill(bench.plain, prompt.ids)
    return checked(
        {
            "reposition_error": distance(fuse(bench.lm, prompt, blocks=bench.load_disk()).next_logits, masked),
            "floor_error": distance(bench.floor_logits(), masked),
            "again_error": distance(bench.over_earlier().next_logits, masked),
            "plain_reuse_error": distance(reused, masked),
            "full_error": distance(fuse(bench.lm, prompt, "full").next_logits, read),
        },
        bench.lm.dtype,
    )


def checked(errors: dict[str, float], dtype: torch.dtype) -> dict[str, float]:
    """Return the errors, because a fast wrong answer is not a result.

    Raises RagCacheError for an error above 0.001 in float32, or above 0.1 in half precision.
    """
    allowed = 1e-3 if dtype == torch.float32 else 0.1
    for what, error in errors.items():
        if not error <= allowed:
            raise RagCacheError(f"{what} is {error:.3g}: what would be timed does not compute what transformers does")
    return errors


def distance(ours: Tensor, theirs: Tensor) -> float:
    """Return the norm of the difference over the norm of `theirs`."""
    return float((ours - theirs).norm() / theirs.norm())


def in_hand(blocks: Sequence[KVBlock], device: torch.device) -> list[KVBlock]:
    """Return the blocks as a question finds them: in page-locked host memory if the model is on a GPU."""
    if device.type != "cuda":
        return list(blocks)
    return [
        replace(block, keys=block.keys.cpu().pin_memory(), values=block.values.cpu().pin_memory()) for block in blocks
    ]


def first_token(fused: FuseOutput) -> int:
    """Return the greedy first token, and free the cache."""
    token = int(fused.next_logits.argmax())
    fused.cache.release()
    return token


def _close(loader: BlockLoader) -> None:
    loader.close()
    loader.kv.close()


def _blocks(loaded: Sequence[Loaded | None]) -> list[KVBlock]:
    found = [one.block for one in loaded if one is not None]
    if len(found) < len(loaded):
        raise MissingBlockError("a block that the benchmark wrote is not in its store")
    return found
