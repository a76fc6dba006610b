"""`rc.encode` and `rc.fuse`: the whole of fused prefill in two functions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ragcache.errors import ConfigError, StaleBlockError
from ragcache.fusion import get_method
from ragcache.fusion.base import FusionMethod, Inputs, PhaseTimes
from ragcache.kv.block import KVBlock
from ragcache.kv.cache import FusedCache
from ragcache.kv.identity import Recipe
from ragcache.models.lm import LanguageModel
from ragcache.prompt import Prompt


@dataclass(frozen=True, eq=False)
class Fused:
    """A prompt that has been read.

    next_logits: float32 [vocab_size], for the first token of the answer
    cache:       what decoding goes on from
    timings:     seconds by phase
    computed_tokens: tokens that the model ran in each layer, encoding of missing blocks left out
    encoded_tokens:  tokens of blocks that had to be made for this call
    """

    prompt: Prompt
    next_logits: Tensor
    cache: FusedCache
    timings: PhaseTimes
    computed_tokens: tuple[int, ...]
    encoded_tokens: int

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that the model did not run, in the layer where it ran most."""
        return self.prompt.num_tokens - max(self.computed_tokens) - self.encoded_tokens


def encode(lm: LanguageModel, prompt: Prompt, recipe: str | Recipe = "isolated") -> list[KVBlock]:
    """One KV block a chunk of the prompt.

    Raises ConfigError for an unknown recipe, and what `LanguageModel.encode` raises.
    """
    return lm.encode(prompt.chunk_ids, recipe, prompt.prefix_ids)


def fuse(
    lm: LanguageModel,
    prompt: Prompt,
    method: str | FusionMethod = "reposition",
    blocks: Sequence[KVBlock] | None = None,
    *,
    recipe: str | Recipe | None = None,
    prefix_block: KVBlock | None = None,
    reserve_tokens: int = 64,
    **options: Any,
) -> Fused:
    """Fused prefill: put the blocks in place and run the question.

    blocks: one a chunk, as `encode` returns them under `recipe`; encoded here when None
    recipe: how the blocks were (or are to be) encoded; None: what the blocks say, else the method's first choice
    prefix_block: the isolated block of the prefix ids; encoded here when None
    reserve_tokens: room to leave in the cache for decoding; it grows beyond that
    options: the method's own

    Raises ConfigError (method, option, recipe), StaleBlockError (blocks of another model or another prompt),
    ContextTooLongError, PromptError.
    """
    chosen = get_method(method, **options)
    recipe = _recipe(recipe, blocks or (), chosen)
    if recipe.name not in chosen.recipes:
        raise ConfigError(
            f"method {chosen.name!r} needs blocks of recipe {' or '.join(chosen.recipes)}, not {recipe.name!r}; "
            "encode the chunks again under that recipe"
        )
    lm.check_ids(prompt.ids, "the prompt")
    times = PhaseTimes()
    inputs, encoded = _inputs(lm, prompt, chosen, recipe, blocks, prefix_block, times)
    done = chosen.prefill(lm, prompt, inputs, times, reserve_tokens)
    return Fused(prompt, done.logits, done.cache, times, done.computed_tokens, encoded)


def _recipe(given: str | Recipe | None, blocks: Sequence[KVBlock], method: FusionMethod) -> Recipe:
    """Raises StaleBlockError when the blocks' own recipes differ from the one given, or from each other."""
    found = {block.recipe for block in blocks if block.recipe is not None}
    recipe = Recipe.of(given) if given is not None else next(iter(found), Recipe.of(method.recipes[0]))
    if found - {recipe}:
        other = next(iter(found - {recipe}))
        raise StaleBlockError(f"blocks of recipe {other.name!r} were given for {recipe.name!r}; encode them alike")
    return recipe


def _inputs(
    lm: LanguageModel,
    prompt: Prompt,
    method: FusionMethod,
    recipe: Recipe,
    blocks: Sequence[KVBlock] | None,
    prefix_block: KVBlock | None,
    times: PhaseTimes,
) -> tuple[Inputs, int]:
    if not method.reuses_blocks:
        return Inputs(None, (), recipe), 0
    started, encoded = time.perf_counter(), 0
    if prefix_block is None and prompt.prefix_ids:
        prefix_block = lm.encode([prompt.prefix_ids])[0]
        encoded += len(prompt.prefix_ids)
    if blocks is None:
        blocks = lm.encode(prompt.chunk_ids, recipe, prompt.prefix_ids, prefix_block=prefix_block)
        encoded += sum(len(chunk) for chunk in prompt.chunk_ids)
    times.encode_s += time.perf_counter() - started
    _check_blocks(lm, prompt, blocks, prefix_block)
    return Inputs(prefix_block, blocks, recipe), encoded


def _check_blocks(lm: LanguageModel, prompt: Prompt, blocks: Sequence[KVBlock], prefix: KVBlock | None) -> None:
    if len(blocks) != len(prompt.chunk_ids):
        raise StaleBlockError(f"{len(blocks)} blocks were given for {len(prompt.chunk_ids)} chunks; pass one a chunk")
    pairs = [(f"chunk {i}", b, len(c)) for i, (b, c) in enumerate(zip(blocks, prompt.chunk_ids, strict=True))]
    if prefix is not None:
        pairs.append(("the prefix", prefix, len(prompt.prefix_ids)))
    shape = lm.shape
    for what, block, num_tokens in pairs:
        layers, heads, tokens, width = block.keys.shape
        if (layers, heads, width, block.values.shape[3]) != (
            shape.num_layers,
            shape.num_kv_heads,
            shape.key_dim,
            shape.value_dim,
        ):
            raise StaleBlockError(f"the block of {what} was made by another model; encode it with {lm.name}")
        if tokens != num_tokens:
            raise StaleBlockError(f"the block of {what} holds {tokens} tokens and its text has {num_tokens}; encode it")
