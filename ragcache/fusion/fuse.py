"""Fused prefill: `rc.encode` makes the passages' blocks, and `rc.fuse` places them and runs the question."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, NamedTuple, Self

from torch import Tensor

from ragcache.errors import ConfigError, PromptError, StaleBlockError
from ragcache.fusion import METHODS, get_method
from ragcache.fusion.layout import AddedTokens, Layout
from ragcache.fusion.method import FusionMethod, PhaseTimes, PrefillOutput, PrefillRequest
from ragcache.kv.block import KVBlock
from ragcache.kv.block_key import Neighbours, Recipe
from ragcache.kv.buffers import SharedContext
from ragcache.kv.exact import Exact
from ragcache.models.card import ModelCard
from ragcache.models.kvzip import num_kept
from ragcache.models.language_model import LanguageModel
from ragcache.prompt import Part, Passages, Prompt, Text


class TokenCounts(NamedTuple):
    """The tokens of a prompt by their cost. The three whole numbers add up to the prompt's length.

    computed: tokens that the model ran for this question, as a mean over its layers, rounded: a token that ran in half
              of the layers counts half
    created:  tokens whose KV was in no tier and was encoded for this question, whether or not they also ran again
    cached:   the rest: tokens whose KV was loaded and placed, each in proportion to the layers in which it did not run
    """

    computed: int
    created: int
    cached: int

    @classmethod
    def of(cls, num_tokens: int, ran: Sequence[int], created: int) -> Self:
        """Count a prompt of `num_tokens` tokens. ran: tokens that ran, by layer"""
        created = min(created, num_tokens)
        computed = min(round(fmean(ran)), num_tokens - created)
        return cls(computed, created, num_tokens - computed - created)


@dataclass(frozen=True, eq=False)
class FuseOutput(PrefillOutput):
    """The result of reading a prompt.

    prompt:          the prompt as it was given
    layout:          the position of every token, including those that the method added
    timings:         seconds by phase
    computed_tokens: see `PrefillOutput`; the tokens in `encoded_tokens` are not counted
    kept_tokens:     see `PrefillOutput`
    encoded_tokens:  tokens of the prefix and of blocks whose KV was not given and had to be computed in this call
    reserved_ids:    ids of tokens that the method added, which no answer may contain
    """

    prompt: Prompt | Sequence[Part]
    layout: Layout
    timings: PhaseTimes
    encoded_tokens: int
    reserved_ids: frozenset[int] = frozenset()

    @property
    def next_logits(self) -> Tensor:
        """Return the logits of the answer's first token: float32 [vocab_size]."""
        return self.logits

    @property
    def prompt_tokens(self) -> int:
        """Return how many tokens the model read, including those that the method added."""
        return self.layout.num_tokens

    @property
    def added_tokens(self) -> int:
        """Return how many tokens the method put between the prompt's own (link tokens, markers)."""
        parts = self.prompt.parts if isinstance(self.prompt, Prompt) else self.prompt
        return self.layout.num_tokens - sum(part.num_tokens for part in parts)

    def share(self) -> SharedContext:
        """Return the context before the suffix, for other questions over the same passages; see `base` of `fuse`.

        Raises ConfigError if heads or layers hold different tokens (of blocks that keep a share of their KV, or with a
        method that drops some), or if a recurrent layer's state would have to be cut.
        """
        last = self.prompt.parts[-1] if isinstance(self.prompt, Prompt) else self.prompt[-1]
        return self.cache.share(self.layout.num_tokens - last.num_tokens)

    @property
    def cached_tokens(self) -> int:
        """Return how many of the prompt's tokens had KV before this call; see `TokenCounts.cached`."""
        return self.counts().cached

    def counts(self, created: int = 0) -> TokenCounts:
        """Count the prompt's tokens.

        created: tokens that were encoded for this prompt before this call, besides `encoded_tokens`
        """
        return TokenCounts.of(self.prompt_tokens, self.computed_tokens, self.encoded_tokens + created)


@dataclass(frozen=True, eq=False)
class PromptPlan:
    """How a method reads a prompt: the position of every token, and the recipe of the passages' blocks.

    prompt: the prompt as it was given
    parts:  texts and groups of passages, in order
    added:  tokens that the method puts between them
    """

    prompt: Prompt | Sequence[Part]
    method: FusionMethod
    parts: Sequence[Part]
    recipe: Recipe
    layout: Layout
    added: AddedTokens

    @classmethod
    def of(
        cls,
        lm: ModelCard,
        method: FusionMethod,
        prompt: Prompt | Sequence[Part],
        recipe: str | Recipe | None = None,
        *,
        blocks: Sequence[KVBlock] | None = None,
    ) -> Self:
        """Plan how `method` reads `prompt`.

        recipe: how the passages' blocks were (or are to be) encoded; None: the blocks' own recipe, else as
                `block_recipe` chooses
        blocks: the blocks that will be given, whose recipes are compared with `recipe`; None: none

        Raises ConfigError or PromptError if the method cannot read the prompt, StaleBlockError if the recipes differ.
        """
        check_method(lm, method)
        parts = _parts(lm, method, prompt)
        added = method.added_to(lm, parts)
        has_passages = any(isinstance(part, Passages) and part.chunk_ids for part in parts)
        used = _used_recipe(lm, method, recipe, blocks, added if has_passages else None)
        return cls(prompt, method, parts, used, method.layout(lm, parts, used), added)

    @property
    def chunks(self) -> list[Sequence[int]]:
        """Return the token ids of every passage."""
        return [chunk for part in self.parts if isinstance(part, Passages) for chunk in part.chunk_ids]

    @property
    def prefix_ids(self) -> list[int]:
        """Return the ids before the first passage of a Prompt; an empty list if the prompt is a list of parts."""
        return [*self.prompt.prefix_ids, *self.added.behind_prefix] if isinstance(self.prompt, Prompt) else []


def encode(
    lm: LanguageModel,
    prompt: Prompt,
    recipe: str | Recipe = "isolated",
    *,
    neighbours: Sequence[Neighbours] | None = None,
) -> list[KVBlock]:
    """Encode each chunk of the prompt as a KV block.

    recipe:     "isolated", "prefix", "primer", or a Recipe; `block_recipe` returns a method's recipe, markers included
    neighbours: for each chunk, the ids of the chunks read before it, for a recipe with neighbours

    Raises ConfigError for an unknown recipe, and the errors of `LanguageModel.encode`.
    """
    return lm.encode(prompt.chunk_ids, recipe, prompt.prefix_ids, neighbours=neighbours)


def fuse(
    lm: LanguageModel,
    prompt: Prompt | Sequence[Part],
    method: str | FusionMethod = "reposition",
    blocks: Sequence[KVBlock] | None = None,
    *,
    recipe: str | Recipe | None = None,
    reserve_tokens: int = 64,
    exact: Exact | None = None,
    base: SharedContext | None = None,
    **options: Any,
) -> FuseOutput:
    """Place the passages' blocks and run the question over them: fused prefill.

    prompt:         a Prompt; or, for a method that `keeps_context`, several groups of passages with text between them.
                    The result equals a forward pass over all ids in which the tokens of a passage see only that passage
    method:         a method's name, with its options as further keyword arguments, or a method object
    blocks:         one block for each chunk that `exact` does not hold, as `encode` returns them under `recipe`; None:
                    they are encoded here
    recipe:         how the blocks were (or are to be) encoded; None: the blocks' own recipe, else as `block_recipe`
                    chooses
    reserve_tokens: room to leave in the cache for decoding; the cache grows when more is needed
    exact:          KV of the prompt's first tokens, from `LanguageModel.read` or a PrefixCache. For a Prompt and a
                    method that reads blocks, these tokens are `method.prefix_ids`: the prefix and the tokens that the
                    method adds to it (KVLink's KV-START). For a method with `takes_exact`, or a prompt of several
                    groups, they may be any number of tokens that does not end within a passage whose block is placed.
                    None: the KV is computed here
    base:           instead of blocks, the whole context before the suffix, from `FuseOutput.share` of the same prompt
                    with another suffix; for a method with `shares_context`. It is not copied
    options:        the method's options

    Raises ConfigError (method, option, recipe, exact, base), StaleBlockError (blocks of another model or another
    prompt), ContextTooLongError, PromptError.
    """
    plan = PromptPlan.of(lm, get_method(method, **options), prompt, recipe, blocks=blocks)
    return prefill(lm, plan, blocks, reserve_tokens=reserve_tokens, exact=exact, base=base)


def prefill(
    lm: LanguageModel,
    plan: PromptPlan,
    blocks: Sequence[KVBlock] | None = None,
    *,
    reserve_tokens: int = 64,
    exact: Exact | None = None,
    base: SharedContext | None = None,
) -> FuseOutput:
    """Read a prompt that has been planned. `fuse` describes the arguments and the errors."""
    method, layout, recipe, prompt = plan.method, plan.layout, plan.recipe, plan.prompt
    encodes = plan.chunks and layout.separate and blocks is None and base is None
    if encodes and recipe.sees_prefix and not isinstance(prompt, Prompt):
        raise ConfigError(
            f"recipe {recipe} encodes passages behind a Prompt's prefix, and a list of parts has none; give the "
            "blocks, a Prompt, or recipe='isolated'"
        )
    prefix_ids, suffix_tokens = plan.prefix_ids, plan.parts[-1].num_tokens
    if exact is not None:
        _check_exact(method, layout, exact, len(prefix_ids) if isinstance(prompt, Prompt) else None)
    _check_base(method, layout, base, suffix_tokens)
    lm.check_ids(layout.ids, "the prompt")
    request = PrefillRequest(lm, layout, exact=exact, base=base, reserve_tokens=reserve_tokens)
    request, encoded = _with_blocks(request, plan.chunks, recipe, prefix_ids, blocks)
    if lm.shape.states and not layout.running(request.known).behind:
        raise PromptError(
            f"text stands between two passages, and {lm.name} has recurrent layers, whose blocks are joined "
            "side by side alone; choose full, or put it before, behind or into a passage"
        )
    return FuseOutput(
        **vars(method.prefill(request)),
        prompt=prompt,
        layout=layout,
        timings=request.times,
        encoded_tokens=encoded,
        reserved_ids=plan.added.reserved,
    )


def _used_recipe(
    lm: ModelCard,
    method: FusionMethod,
    recipe: str | Recipe | None,
    blocks: Sequence[KVBlock] | None,
    added: AddedTokens | None,
) -> Recipe:
    """Return the given recipe, else the blocks' recipe, else as `block_recipe` chooses.

    added: tokens that the method adds; None if the prompt has no passages

    Raises StaleBlockError if a block has another recipe, ConfigError if the method cannot use the recipe.
    """
    stated = [block.recipe for block in blocks or () if block.recipe is not None]
    used = _recipe(lm, method, next(iter(stated), None) if recipe is None else recipe, added)
    if other := next((other for other in stated if other != used), None):
        raise StaleBlockError(f"blocks of recipe {other} were given for {used}; encode them alike")
    return used


def _parts(lm: ModelCard, method: FusionMethod, prompt: Prompt | Sequence[Part]) -> Sequence[Part]:
    """Return the prompt's parts. Raises ConfigError or PromptError if the method cannot read them."""
    if isinstance(prompt, Prompt):
        method.check(lm, prompt)
        return prompt.parts
    if not method.keeps_context:
        raise ConfigError(f"method {method.name!r} cannot keep the context of earlier turns")
    if not prompt or not isinstance(prompt[-1], Text) or not prompt[-1].ids:
        raise PromptError("the prompt ends with no text; give the question at least one token")
    return prompt


def _check_exact(method: FusionMethod, layout: Layout, exact: Exact, prefix_tokens: int | None) -> None:
    """Raise ConfigError if the method cannot continue from this KV.

    prefix_tokens: tokens before the first passage of a Prompt; None for a list of parts
    """
    if prefix_tokens is not None and method.reuses_blocks and exact.num_tokens != prefix_tokens:
        raise ConfigError(
            f"method {method.name!r} reads blocks and goes on from exact KV of the prefix's {prefix_tokens} tokens "
            f"alone; that of {exact.num_tokens} was given"
        )
    if prefix_tokens is not None and not method.reuses_blocks and not method.takes_exact:
        raise ConfigError(f"method {method.name!r} runs every token; leave `exact` out")
    most = layout.num_tokens - 1
    if not 0 <= exact.num_tokens <= most:
        raise ConfigError(
            f"exact KV of {exact.num_tokens} tokens was given for a prompt of {layout.num_tokens}, of which the last "
            f"token has to run; give that of {most} at most"
        )
    usable = layout.usable(exact.num_tokens)
    if usable < exact.num_tokens:
        raise ConfigError(f"exact KV of {exact.num_tokens} tokens ends within a passage; cut it to {usable}")


def _check_base(method: FusionMethod, layout: Layout, base: SharedContext | None, suffix_tokens: int) -> None:
    if base is None:
        return
    if not method.shares_context:
        raise ConfigError(
            f"method {method.name!r} reads every prompt by itself and takes no shared context; leave `base` out"
        )
    if base.num_tokens != layout.num_tokens - suffix_tokens:
        raise ConfigError(
            f"a context of {base.num_tokens} tokens was given for a prompt with {layout.num_tokens - suffix_tokens} "
            "before its suffix; share it from the same prefix and passages"
        )


def block_recipe(lm: ModelCard, method: FusionMethod, recipe: str | Recipe | None = None) -> Recipe:
    """Return the recipe, markers included, under which chunks are encoded for `method`.

    recipe: a name or a Recipe; None: the recipe that the checkpoint was trained with, else the method's first choice

    Raises ConfigError for a recipe that the method cannot use.
    """
    check_method(lm, method)
    return _recipe(lm, method, recipe, method.additions(lm))


def _recipe(lm: ModelCard, method: FusionMethod, recipe: str | Recipe | None, added: AddedTokens | None) -> Recipe:
    """Return the recipe to encode passages with.

    recipe: None: as `block_recipe` chooses
    added:  tokens that the method adds, whose markers the recipe gets; None: the prompt has no passages, and the
            recipe keeps its own markers

    Raises ConfigError for a recipe that the model or the method cannot use.
    """
    if recipe is None:
        trained = lm.reuse.recipe if lm.reuse is not None else None
        recipe = trained if trained in method.recipes else method.recipes[0]
    chosen = lm.recipe(recipe)
    if not method.reuses_blocks:
        return chosen
    if lm.is_recurrent and not chosen.joins_states:
        raise ConfigError(
            f"{lm.name} has recurrent layers and reads no blocks of recipe {chosen}; use isolated, prefix or primer"
        )
    if chosen.name not in method.recipes:
        raise ConfigError(
            f"method {method.name!r} needs blocks of recipe {' or '.join(method.recipes)}, not {chosen.name!r}; "
            "encode the chunks again under that recipe"
        )
    expected = chosen if added is None else replace(chosen, markers=added.markers)
    if not expected.is_dense and not method.takes_sparse:
        movers = ", ".join(name for name, kind in METHODS.items() if kind.reuses_blocks and kind().takes_sparse)
        raise ConfigError(
            f"method {method.name!r} runs passages' tokens again or chooses among them, and needs blocks that hold all "
            f"of them, not recipe {expected}; use one that only moves blocks ({movers}), or encode them with kept=1"
        )
    if added is None:
        return chosen
    if (chosen.neighbours or chosen.primer_ids) and added.positions == "encoded":
        raise ConfigError(
            f"method {method.name!r} leaves blocks at the positions that they were encoded at, which were behind other "
            "text; choose one that moves them, such as reposition, or a recipe without neighbours or primer"
        )
    if chosen.markers not in (None, added.markers):
        raise ConfigError(f"method {method.name!r} needs blocks of recipe {expected}, not {chosen}; encode them again")
    return expected


def check_method(lm: ModelCard, method: FusionMethod) -> None:
    """Raise ConfigError if the model has recurrent layers and the method cannot carry their states through passages."""
    if lm.is_recurrent and not method.joins_states:
        joining = ", ".join(name for name, kind in METHODS.items() if kind.joins_states)
        raise ConfigError(
            f"method {method.name!r} cannot read with {lm.name}, which has recurrent layers: their states pass over "
            f"whole passages, in order; choose one of {joining}"
        )


def _with_blocks(
    request: PrefillRequest,
    chunks: Sequence[Sequence[int]],
    recipe: Recipe,
    prefix_ids: Sequence[int],
    blocks: Sequence[KVBlock] | None,
) -> tuple[PrefillRequest, int]:
    """Return the request with its prefix's KV and its blocks, and how many tokens were encoded to make them.

    blocks: None: they are encoded here

    Raises StaleBlockError for given blocks that do not fit.
    """
    if not request.layout.separate or request.base is not None:
        return request, 0
    lm = request.lm
    started, encoded = time.perf_counter(), 0
    if request.exact is None and prefix_ids:
        request = replace(request, exact=lm.read(prefix_ids))
        encoded += len(prefix_ids)
    placed = request.layout.placed(request.known)
    if blocks is None:
        read = [chunks[piece.passage] for piece in placed if piece.passage is not None]
        blocks = lm.encode(read, recipe, prefix_ids, prefix=request.exact)
        encoded += sum(block.num_tokens for block in blocks)
    times = PhaseTimes(encode_s=time.perf_counter() - started)
    _check_blocks(lm, [piece.ids for piece in placed], blocks, recipe)
    return replace(request, blocks=blocks, times=times), encoded


def _check_blocks(
    lm: LanguageModel, chunks: Sequence[Sequence[int]], blocks: Sequence[KVBlock], recipe: Recipe
) -> None:
    """Raise StaleBlockError if the blocks cannot be those of these ids. chunks: ids with their markers"""
    if len(blocks) != len(chunks):
        raise StaleBlockError(
            f"{len(blocks)} blocks were given for {len(chunks)} chunks: they are not those of the passages that have "
            "to be placed; pass one a chunk"
        )
    for rank, (block, chunk) in enumerate(zip(blocks, chunks, strict=True)):
        check_block(lm, f"chunk {rank}", block, len(chunk), num_kept(recipe, len(chunk)))


def check_block(lm: LanguageModel, name: str, block: KVBlock, num_tokens: int, held: int | None = None) -> None:
    """Raise StaleBlockError if the block does not fit the model or the text.

    held: tokens that each head should hold, as a mean over the layers; None: all tokens
    """
    states = zip(block.states, lm.shape.states, strict=False)
    is_ours = len(block.states) == len(lm.shape.states) and all(
        state.fits(own, block.num_tokens) for state, own in states
    )
    if block.layers != lm.shape.layers or not is_ours:
        raise StaleBlockError(f"the block of {name} was made by another model; encode it with {lm.name}")
    if block.num_tokens != num_tokens:
        read = block.num_tokens
        raise StaleBlockError(f"the block of {name} holds {read} tokens and its text has {num_tokens}; encode it")
    expected = num_tokens if held is None else held
    found = sum(block.tokens_by_layer)
    if found != expected * block.num_layers:
        raise StaleBlockError(
            f"a head of the block of {name} holds {found / block.num_layers:g} of {num_tokens} tokens, and {expected} "
            "are wanted; state the recipe that it was encoded under, or encode it"
        )
