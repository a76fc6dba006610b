"""A causal language model that reads chunks once and moves their keys to other positions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ragcache.errors import ConfigError, PromptError
from ragcache.kv.block import KVBlock
from ragcache.kv.block_key import Neighbours, Recipe
from ragcache.kv.buffers import BufferPool, SharedContext
from ragcache.kv.cache_shape import CacheShape
from ragcache.kv.exact import Exact, place_exact
from ragcache.kv.fused_cache import FusedCache, Place
from ragcache.kv.rope import Rope
from ragcache.kv.sparse_block import keep
from ragcache.models.attention import CURRENT, OBSERVER, FusedPass
from ragcache.models.attention_on_cpu import prepare
from ragcache.models.batch import ForwardRequest, run_pieces
from ragcache.models.batches import plan_batches
from ragcache.models.block_model import BlockModel
from ragcache.models.encode import encode_batch
from ragcache.models.kvzip import check_replay, evict_lowest, measure_scores, num_kept, replay_ids
from ragcache.models.layerwise import BeforeLayer, walking
from ragcache.models.machine import translate_device_errors
from ragcache.models.scheduler import Scheduler
from ragcache.models.support import text_config
from ragcache.models.trained_tokens import TrainedTokens
from ragcache.runtime import during, team_ends

# Padded tokens that are encoded together. More of them overflow a CPU's caches: 792 tokens/s at 512 against 723 at
# 2,048 for the 135M shape on two cores. A GPU is faster with more.
CPU_BATCH_TOKENS = 512
GPU_BATCH_TOKENS = 16384
# Tokens of one pass while several callers want to run: the longest that a new caller waits. A run with no others
# waiting is cut too, so that a new caller does not wait for thousands of tokens.
CPU_PASS_TOKENS, CPU_ALONE_TOKENS = 64, 1024
GPU_PASS_TOKENS, GPU_ALONE_TOKENS = 2048, 16384
DEFAULT_POOL_BYTES = 2 << 30


class LanguageModel(BlockModel):
    """A model loaded by `rc.load_lm`.

    Thread-safe: each pass carries its own state, and runs of several threads share passes.

    model, tokenizer: transformers' own objects
    rope:          rotates keys of any layer to any positions
    shape:         KV heads and their widths by layer, dtype and device of the KV
    scheduler:     the thread that runs the model, and its queue of requests
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        rope: Rope,
        shape: CacheShape,
        fingerprint: str,
        name: str,
        reuse: TrainedTokens | None = None,
    ) -> None:
        vocab_size: int = model.get_output_embeddings().weight.shape[0]
        generation = getattr(model, "generation_config", None)
        super().__init__(model.config, generation, tokenizer, vocab_size, fingerprint, name, reuse)
        self.model = model
        self.rope = rope
        self.shape = shape
        self.pool = BufferPool(shape, DEFAULT_POOL_BYTES)
        on_cpu = shape.device.type == "cpu"
        if on_cpu and shape.dtype == torch.bfloat16:
            prepare()
        self.scheduler = Scheduler(
            partial(run_pieces, model),
            CPU_PASS_TOKENS if on_cpu else GPU_PASS_TOKENS,
            CPU_ALONE_TOKENS if on_cpu else GPU_ALONE_TOKENS,
        )

    @property
    def device(self) -> torch.device:
        return self.shape.device

    @property
    def dtype(self) -> torch.dtype:
        return self.shape.dtype

    @property
    def batch_tokens(self) -> int:
        """Return the number of padded tokens that this device encodes together fastest."""
        return CPU_BATCH_TOKENS if self.device.type == "cpu" else GPU_BATCH_TOKENS

    @property
    def kv_bytes_per_token(self) -> int:
        return self.shape.token_bytes

    @team_ends()
    @translate_device_errors()
    def encode(
        self,
        chunks: Sequence[Sequence[int]],
        recipe: str | Recipe = "isolated",
        prefix_ids: Sequence[int] = (),
        *,
        prefix: Exact | None = None,
        batch_tokens: int | None = None,
        is_needed: Callable[[], bool] | None = None,
        neighbours: Sequence[Neighbours] | None = None,
    ) -> list[KVBlock]:
        """Encode each chunk as `recipe` states and return their KV blocks, in order, on the model's device.

        recipe: "isolated" (positions 0, 1, ...), "prefix" (after prefix_ids, which every chunk attends to) or "primer"
                (after prefix_ids and a primer, which every chunk attends to). A Recipe with markers reads them around
                the chunk and keeps their KV with it. A Recipe with `kept` below 1 lets the model read each chunk again
                and drops the tokens that it attends to least
        prefix: the KV of prefix_ids and of the recipe's primer after them, or of their first tokens; the rest is
                computed
        batch_tokens: padded tokens that run together; None: as many as suit the device
        is_needed: called in every layer of every pass; if it returns False, AbandonedSignal is raised and nothing is
                returned
        neighbours: by chunk, the ids of the chunks that it is read after; required by a recipe with neighbours

        Raises PromptError for an empty chunk or an id outside the vocabulary, ContextTooLongError for a chunk that is
        too long for the model (with its neighbours), ConfigError for an unknown recipe or for neighbours that do not
        fit the recipe.
        """
        self.scheduler.home.check()
        recipe = self.recipe(recipe)
        if self.shape.states and not recipe.joins_states:
            raise ConfigError(
                f"{self.name} has recurrent layers: its passages are read alone or behind the prefix and kept whole, "
                f"not by recipe {recipe}; use isolated, prefix or primer"
            )
        head = self._read_before(recipe)
        behind = [*prefix_ids, *recipe.primer_ids] if recipe.sees_prefix else []
        heads = [[*head, *recipe.before(near)] for near in _by_chunk(recipe, len(chunks), neighbours)]
        for rank, (before, chunk) in enumerate(zip(heads, chunks, strict=True)):
            if not chunk:
                raise PromptError(f"chunk {rank} has no tokens; leave empty passages out")
            self.check_ids([*behind, *before, *recipe.marked(chunk)], f"chunk {rank}")
            check_replay(self, recipe, behind, chunk, f"chunk {rank}")
        rows = [[*before, *recipe.marked(chunk)] for before, chunk in zip(heads, chunks, strict=True)]
        context = self.read(behind, prefix) if behind else None
        layers = [context.layer_state(layer)[:2] for layer in range(self.shape.num_layers)] if context else []
        blocks: list[KVBlock | None] = [None] * len(rows)
        for batch in plan_batches([len(row) for row in rows], batch_tokens or self.batch_tokens):
            members, skips = [rows[rank] for rank in batch], [len(heads[rank]) for rank in batch]
            states = context.states if context else ()
            done = encode_batch(self.model, self.rope, self.shape, members, layers, skips, is_needed, states)
            for rank, block in zip(batch, done, strict=True):
                blocks[rank] = self._apply_recipe(block, chunks[rank], recipe, layers, is_needed).made_by(recipe)
        return [block for block in blocks if block is not None]

    def _apply_recipe(
        self,
        block: KVBlock,
        chunk: Sequence[int],
        recipe: Recipe,
        prefix: Sequence[tuple[Tensor, Tensor]],
        is_needed: Callable[[], bool] | None,
    ) -> KVBlock:
        """Return the part of a complete block that the recipe keeps."""
        if recipe.is_dense:
            return block
        if num_kept(recipe, block.num_tokens) < block.num_tokens:
            behind = replay_ids(self, recipe, chunk)
            layer_scores = measure_scores(self.model, self.rope, self.new_cache, block, behind, prefix, is_needed)
            return evict_lowest(block, layer_scores, recipe)
        stays = torch.ones(block.num_tokens, dtype=torch.bool, device=self.device)
        return keep(block, [stays.expand(layer.num_kv_heads, -1) for layer in block.layers])

    def _read_before(self, recipe: Recipe) -> list[int]:
        """Return the ids that are read before every chunk and whose KV is dropped: a lone BOS, or none.

        Raises ConfigError if the recipe needs a BOS token and the model has none.
        """
        if not recipe.bos:
            return []
        bos = text_config(self.model).bos_token_id
        if bos is None:
            raise ConfigError(f"{self.name} has no BOS token; use a recipe without bos")
        return [int(bos)]

    @torch.inference_mode()
    def read(self, ids: Sequence[int], known: Exact | None = None) -> SharedContext:
        """Run plain text from position 0 on and return its KV, for all prompts that begin with this text.

        known: the KV of its first tokens, from an earlier pass; only the other tokens run

        Raises PromptError, ContextTooLongError, and every error of `run`.
        """
        self.check_ids(ids, "the prefix")
        start = 0 if known is None else known.num_tokens
        cache = self.new_cache(len(ids), partial(place_exact, exact=known) if known is not None and start else None)
        if start < len(ids):
            self.run(ids[start:], start, cache)
        cache.place()
        return cache.share(len(ids))

    def finish(self) -> None:
        """Wait until the device has finished its queued work; only a GPU queues any."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def new_cache(self, capacity: int, fill: Place | None = None, base: SharedContext | None = None) -> FusedCache:
        """Return a cache with room for `capacity` tokens; see FusedCache."""
        return FusedCache(self.pool, capacity, fill, base)

    @torch.inference_mode()
    def run(
        self,
        ids: Sequence[int] | Tensor,
        positions: Tensor | int,
        cache: FusedCache,
        *,
        slots: Tensor | Sequence[Tensor] | None = None,
        ordered: bool | None = None,
        before_layer: BeforeLayer | None = None,
        num_logits: int | None = None,
    ) -> Tensor:
        """Run tokens over the contents of the cache and add their keys and values to it.

        positions: int64 [num_tokens], or the position of the first of consecutive tokens
        slots:     replace the entries in these slots instead of appending (recompute methods): int64 [num_tokens] for
                   every layer, or one such tensor per layer
        ordered:   True: the tokens come after everything in the cache, in order, and see all of it. False: they see the
                   entries at or before their own position. None: True unless `slots` are given
        before_layer: decides before each layer which of the tokens continue; see layerwise.BeforeLayer
        num_logits: return the logits of this many last tokens; None: of the last token, without that axis
        Returns logits, float32 [vocab_size] or [num_logits, vocab_size]. `cache.computed_tokens` counts the tokens run.

        Runs of several threads share forward passes where possible (`models/scheduler.py`), and long runs may be cut
        into pieces. The results equal those of a single separate pass except for float rounding. Raises CancelledError
        and TimedOutError if the current `deadline.LIMIT` ends the wait.
        """
        ids = torch.as_tensor(ids, device=self.device)
        if isinstance(positions, int):
            positions = torch.arange(positions, positions + ids.shape[0], device=self.device)
        run = ForwardRequest(ids, positions, cache, slots is None if ordered is None else ordered)
        alone = partial(self._run_alone, run, slots, before_layer, num_logits)
        if self.scheduler.is_current_thread:  # a method that runs the model while placing KV or choosing tokens
            return alone()
        special = slots is not None or before_layer is not None or num_logits is not None or OBSERVER.get() is not None
        return self.scheduler.run(run, alone if special or not run.left else None)

    def _run_alone(
        self,
        run: ForwardRequest,
        slots: Tensor | Sequence[Tensor] | None,
        before_layer: BeforeLayer | None,
        num_logits: int | None,
    ) -> Tensor:
        run.cache.begin(run.positions, slots)
        with during(CURRENT, FusedPass(run.cache, run.positions, run.ordered)), walking(before_layer):
            out = self.model(
                input_ids=run.ids[None],
                position_ids=run.positions[None],
                past_key_values=run.cache,
                use_cache=True,
                # By index: for a slice of rows torch runs a batched product, which copies the head's weights.
                logits_to_keep=torch.arange(-(num_logits or 1), 0, device=self.device),
            )
        logits: Tensor = out.logits[0].float()
        return logits[-1] if num_logits is None else logits


def _by_chunk(recipe: Recipe, num_chunks: int, neighbours: Sequence[Neighbours] | None) -> Sequence[Neighbours]:
    """Return each chunk's neighbours. Raises ConfigError if the recipe needs them and not every chunk has them."""
    if neighbours is None and not recipe.neighbours:
        return [()] * num_chunks
    if neighbours is None or len(neighbours) != num_chunks:
        stated = "none" if neighbours is None else f"those of {len(neighbours)} chunks"
        raise ConfigError(
            f"recipe {recipe} reads each of {num_chunks} chunks behind its neighbours, and {stated} were given; pass "
            "neighbours=, one list of chunks' ids a chunk"
        )
    return neighbours
