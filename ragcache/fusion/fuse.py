"""`rc.encode` and `rc.fuse`: the whole of fused prefill in two functions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from ragcache.errors import ConfigError, StaleBlockError
from ragcache.fusion import get_method
from ragcache.fusion.additions import NO_ADDITIONS, Additions
from ragcache.fusion.base import Exact, FusionMethod, Inputs, PhaseTimes, Prefilled
from ragcache.fusion.eviction import Ballot, SnapKV
from ragcache.kv.block import KVBlock
from ragcache.kv.cache import FusedCache
from ragcache.kv.identity import Recipe
from ragcache.models.attention import observing
from ragcache.models.lm import LanguageModel
from ragcache.prompt import Prompt


@dataclass(frozen=True, eq=False)
class Fused:
    """A prompt that has been read.

    next_logits: float32 [vocab_size], for the first token of the answer
    cache:       what decoding goes on from
    timings:     seconds by phase
    computed_tokens: tokens that the model ran in each layer, encoding of missing blocks left out
    kept_tokens:     tokens that each layer holds, of each KV head where some were evicted
    encoded_tokens:  tokens of blocks that had to be made for this call
    next_position:   position of the answer's first token
    added_tokens:    tokens that the method put between the prompt's own (link tokens, markers)
    reserved_ids:    ids of such tokens, which no answer may hold
    """

    prompt: Prompt
    next_logits: Tensor
    cache: FusedCache
    timings: PhaseTimes
    computed_tokens: tuple[int, ...]
    kept_tokens: tuple[int, ...]
    encoded_tokens: int
    next_position: int
    added_tokens: int = 0
    reserved_ids: frozenset[int] = frozenset()

    @property
    def prompt_tokens(self) -> int:
        """Tokens that the model read, those that the method added among them."""
        return self.prompt.num_tokens + self.added_tokens

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that the model did not run, in the layer where it ran most."""
        return self.prompt_tokens - max(self.computed_tokens) - self.encoded_tokens


def encode(lm: LanguageModel, prompt: Prompt, recipe: str | Recipe = "isolated") -> list[KVBlock]:
    """One KV block a chunk of the prompt.

    recipe: "isolated", "prefix", or a Recipe; what a method needs, markers included, says `block_recipe`

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
    evict: SnapKV | int | None = None,
    exact: Exact | None = None,
    **options: Any,
) -> Fused:
    """Fused prefill: put the blocks in place and run the question.

    method: a name, with the method's options as further keyword arguments, or a method object
    blocks: one a chunk, as `encode` returns them under `recipe`; encoded here when None
    recipe: how the blocks were (or are to be) encoded; None: what the blocks say, else the method's first choice
    prefix_block: the isolated block of the prefix ids (and of what the method puts behind them, such as KVLink's
            KV-START: `method.additions(lm).behind_prefix`); encoded here when None
    reserve_tokens: room to leave in the cache for decoding; it grows beyond that
    evict:  keep few of the passages' tokens for decoding, after any method: how to choose them, or simply how many in
            each layer and KV head; `next_logits` are read off before that
    exact:  KV of the prompt's first tokens, for a method with `takes_exact`
    options: the method's own

    Raises ConfigError (method, option, recipe, evict, exact), StaleBlockError (blocks of another model or another
    prompt), ContextTooLongError, PromptError.
    """
    chosen = get_method(method, **options)
    chosen.check(lm, prompt)
    _check_exact(chosen, prompt, exact, whole_suffix=evict is not None)
    added = chosen.additions(lm) if prompt.chunk_ids else NO_ADDITIONS
    added_ids = added.ids(len(prompt.chunk_ids))
    ballot = _ballot(evict, prompt, added)
    lm.check_ids([*prompt.ids, *added_ids], "the prompt")
    known = _recipe_of(blocks or ())
    recipe = _recipe(lm, chosen, recipe if recipe is not None else known, added)
    if known is not None and known != recipe:
        raise StaleBlockError(f"blocks of recipe {known} were given for {recipe}; encode them alike")
    times = PhaseTimes()
    prefix_ids = [*prompt.prefix_ids, *added.behind_prefix]
    inputs, encoded = _inputs(lm, prompt, prefix_ids, chosen, recipe, blocks, prefix_block, times)
    inputs = replace(inputs, exact=exact)
    if ballot is None:
        done = chosen.prefill(lm, prompt, inputs, times, reserve_tokens)
    else:
        done = _prefill_and_evict(chosen, lm, prompt, inputs, times, reserve_tokens, ballot)
    return Fused(
        prompt=prompt,
        next_logits=done.logits,
        cache=done.cache,
        timings=times,
        computed_tokens=done.computed_tokens,
        kept_tokens=done.kept_tokens,
        encoded_tokens=encoded,
        next_position=done.next_position,
        added_tokens=len(added_ids),
        reserved_ids=added.reserved,
    )


def _prefill_and_evict(
    method: FusionMethod,
    lm: LanguageModel,
    prompt: Prompt,
    inputs: Inputs,
    times: PhaseTimes,
    reserve_tokens: int,
    ballot: Ballot,
) -> Prefilled:
    with observing(ballot):
        done = method.prefill(lm, prompt, inputs, times, reserve_tokens)
    started = time.perf_counter()
    kept = ballot.evict(done.cache, reserve_tokens)
    times.prefill_s += time.perf_counter() - started
    return replace(done, kept_tokens=kept)


def _ballot(choice: SnapKV | int | None, prompt: Prompt, added: Additions) -> Ballot | None:
    if choice is None:
        return None
    links = sum(len(ids) for ids in added.links[: len(prompt.chunk_ids)])
    suffix = len(prompt.suffix_ids)
    before = len(prompt.prefix_ids) + len(added.behind_prefix)
    return Ballot(SnapKV.of(choice), before, links + len(added.behind_chunks) + suffix, suffix)


def _check_exact(method: FusionMethod, prompt: Prompt, exact: Exact | None, *, whole_suffix: bool) -> None:
    """whole_suffix: all of it has to run, since its rows vote on what is evicted."""
    if exact is None:
        return
    if not method.takes_exact:
        raise ConfigError(f"method {method.name!r} reads blocks and cannot go on from exact KV; leave `exact` out")
    most = prompt.context_tokens if whole_suffix else prompt.num_tokens - 1
    if not 0 <= exact.num_tokens <= most:
        what = "the suffix" if whole_suffix else "the last token"
        raise ConfigError(
            f"exact KV of {exact.num_tokens} tokens was given for a prompt of {prompt.num_tokens}, of which {what} has "
            f"to run; give that of {most} at most"
        )


def block_recipe(lm: LanguageModel, method: FusionMethod, recipe: str | Recipe | None = None) -> Recipe:
    """How chunks are encoded for `method`, with its markers.

    recipe: a name or a Recipe; None: what the checkpoint was trained with, else the method's first choice

    Raises ConfigError for a recipe that the method cannot use.
    """
    return _recipe(lm, method, recipe, method.additions(lm))


def _recipe(lm: LanguageModel, method: FusionMethod, recipe: str | Recipe | None, added: Additions) -> Recipe:
    if recipe is None:
        trained = lm.reuse.recipe if lm.reuse is not None else None
        recipe = trained if trained in method.recipes else method.recipes[0]
    chosen = Recipe.of(recipe)
    if not method.reuses_blocks:
        return chosen
    if chosen.name not in method.recipes:
        raise ConfigError(
            f"method {method.name!r} needs blocks of recipe {' or '.join(method.recipes)}, not {chosen.name!r}; "
            "encode the chunks again under that recipe"
        )
    wanted = replace(chosen, markers=added.markers)
    if chosen.markers not in (None, added.markers):
        raise ConfigError(f"method {method.name!r} needs blocks of recipe {wanted}, not {chosen}; encode them again")
    return wanted


def _recipe_of(blocks: Sequence[KVBlock]) -> Recipe | None:
    """What the blocks say; None where they say nothing. Raises StaleBlockError when they differ from each other."""
    found = list(dict.fromkeys(block.recipe for block in blocks if block.recipe is not None))
    if len(found) > 1:
        raise StaleBlockError(f"blocks of recipe {found[0]} and of {found[1]} were given; encode them alike")
    return found[0] if found else None


def _inputs(
    lm: LanguageModel,
    prompt: Prompt,
    prefix_ids: Sequence[int],
    method: FusionMethod,
    recipe: Recipe,
    blocks: Sequence[KVBlock] | None,
    prefix_block: KVBlock | None,
    times: PhaseTimes,
) -> tuple[Inputs, int]:
    if not method.reuses_blocks:
        return Inputs(None, (), recipe), 0
    started, encoded = time.perf_counter(), 0
    if prefix_block is None and prefix_ids:
        prefix_block = lm.encode([prefix_ids])[0]
        encoded += len(prefix_ids)
    if blocks is None:
        blocks = lm.encode(prompt.chunk_ids, recipe, prefix_ids, prefix_block=prefix_block)
        encoded += sum(block.num_tokens for block in blocks)
    times.encode_s += time.perf_counter() - started
    _check_blocks(lm, [recipe.marked(chunk) for chunk in prompt.chunk_ids], prefix_ids, blocks, prefix_block)
    return Inputs(prefix_block, blocks, recipe), encoded


def _check_blocks(
    lm: LanguageModel,
    chunks: Sequence[Sequence[int]],
    prefix_ids: Sequence[int],
    blocks: Sequence[KVBlock],
    prefix: KVBlock | None,
) -> None:
    """Raises StaleBlockError for blocks that cannot be those of these ids (chunks: with their markers)."""
    if len(blocks) != len(chunks):
        raise StaleBlockError(f"{len(blocks)} blocks were given for {len(chunks)} chunks; pass one a chunk")
    pairs = [(f"chunk {i}", b, len(c)) for i, (b, c) in enumerate(zip(blocks, chunks, strict=True))]
    if prefix is not None:
        pairs.append(("the prefix", prefix, len(prefix_ids)))
    shape = lm.shape
    for what, block, num_tokens in pairs:
        layers, heads, tokens, width = block.key_shape
        if (layers, heads, width, block.value_shape[3]) != (
            shape.num_layers,
            shape.num_kv_heads,
            shape.key_dim,
            shape.value_dim,
        ):
            raise StaleBlockError(f"the block of {what} was made by another model; encode it with {lm.name}")
        if tokens != num_tokens:
            raise StaleBlockError(f"the block of {what} holds {tokens} tokens and its text has {num_tokens}; encode it")
