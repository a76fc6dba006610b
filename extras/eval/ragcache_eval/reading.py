"""A prompt read by several methods: blocks are encoded once per recipe; answers and logits come from the same cache."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, Self

import torch
from torch import Tensor

from ragcache.engine.contract import EmbeddedModel
from ragcache.errors import ConfigError
from ragcache.fusion.fuse import FuseOutput, PromptPlan, block_recipe, fuse
from ragcache.fusion.method import FusionMethod
from ragcache.kv.block import KVBlock
from ragcache.kv.block_key import PRIMER, Neighbours, Recipe
from ragcache.kv.exact import Exact
from ragcache.models.card import eos_token_ids
from ragcache.models.generate import Detokenizer, decode
from ragcache.models.language_model import LanguageModel
from ragcache.models.sampler import Sampling
from ragcache.prompt import Prompt, PromptFormat
from ragcache_eval.case import Case


class WrittenAnswer(NamedTuple):
    """A greedy answer: its text, stop strings cut off, and its ids as the model chose them."""

    text: str
    ids: tuple[int, ...]


class Encoded(NamedTuple):
    """Blocks, one per chunk. prefix: the KV before them. encode_s: seconds to make the blocks, paid at ingestion."""

    blocks: list[KVBlock]
    prefix: Exact | None
    encode_s: float


class PromptReader:
    """Reads a prompt by any method. Blocks of a recipe are made on first use and kept for the other methods."""

    def __init__(
        self, lm: LanguageModel | EmbeddedModel, prompt: Prompt, reserve_tokens: int, behind: Sequence[Neighbours] = ()
    ) -> None:
        """Prepare to read `prompt`.

        reserve_tokens: tokens of the answer that the cache has room for
        behind: for each chunk, the ids of the texts that may precede it when it is encoded, in order; (): not known
        """
        self.lm = lm
        self.prompt = prompt
        self.reserve_tokens = reserve_tokens
        self.behind = behind
        self._encoded: dict[tuple[Recipe, tuple[int, ...]], Encoded] = {}

    @classmethod
    def of(cls, lm: LanguageModel | EmbeddedModel, case: Case, form: PromptFormat, reserve_tokens: int) -> Self:
        """Return a reader of a case's prompt that knows which texts may precede each passage."""
        behind = [passage.behind_ids(lm.tokenizer) for passage in case.passages]
        return cls(lm, case.prompt(lm.tokenizer, form), reserve_tokens, behind)

    def ask(self, suffix_ids: Sequence[int]) -> Self:
        """Return a reader of the same passages with another suffix. Both readers share the blocks."""
        prompt = Prompt(self.prompt.prefix_ids, self.prompt.chunk_ids, suffix_ids)
        other = type(self)(self.lm, prompt, self.reserve_tokens, self.behind)
        other._encoded = self._encoded
        return other

    def read(
        self,
        method: FusionMethod,
        recipe: str | None = None,
        kept: float = 1.0,
        neighbours: int = 0,
        primer: str | tuple[int, ...] = "",
    ) -> tuple[FuseOutput, float]:
        """Run fused prefill over blocks in memory, and return its output and the seconds that making the blocks took.

        kept:  share of their KV that the blocks hold
        neighbours: each chunk is encoded after at most this many texts of `behind`, the last of them
        primer: for recipe "primer", as `Recipe` takes it

        Raises the errors of `rc.fuse`, and ConfigError for neighbours if no chunk has any.
        """
        if not method.reuses_blocks:
            return self._fuse(method), 0.0
        method.check(self.lm, self.prompt)
        wanted = block_recipe(self.lm, method, Recipe(PRIMER, primer=primer) if recipe == PRIMER else recipe)
        wanted = block_recipe(self.lm, method, replace(wanted, kept=kept, neighbours=neighbours))
        found = self._blocks(wanted, tuple(method.prefix_ids(self.lm, self.prompt)))
        return self._fuse(method, found, wanted), found.encode_s

    def _fuse(self, method: FusionMethod, found: Encoded | None = None, recipe: Recipe | None = None) -> FuseOutput:
        blocks, exact = (found.blocks, found.prefix) if found is not None else (None, None)
        if not isinstance(self.lm, EmbeddedModel):
            room = self.reserve_tokens
            return fuse(self.lm, self.prompt, method, blocks, recipe=recipe, exact=exact, reserve_tokens=room)
        plan = PromptPlan.of(self.lm, method, self.prompt, recipe, blocks=blocks)
        return self.lm.prefill(plan, blocks or [], self.reserve_tokens)

    def _blocks(self, recipe: Recipe, prefix_ids: tuple[int, ...]) -> Encoded:
        """Return the blocks of all chunks, and the KV of the prefix with a method's additions; both are made once."""
        key = (recipe, prefix_ids)
        if key not in self._encoded:
            prefix = self.lm.read(prefix_ids) if prefix_ids else None
            self._encoded[key] = self._encode(recipe, prefix_ids, prefix)
        return self._encoded[key]

    def _encode(self, recipe: Recipe, prefix_ids: Sequence[int], prefix: Exact | None) -> Encoded:
        same = [found for (made, _), found in self._encoded.items() if made == recipe and not recipe.sees_prefix]
        if same:  # isolated blocks do not depend on the texts before them
            return Encoded(same[0].blocks, prefix, same[0].encode_s)
        started = time.perf_counter()
        near = self._behind(recipe.neighbours) if recipe.neighbours else None
        blocks = self.lm.encode(self.prompt.chunk_ids, recipe, prefix_ids, prefix=prefix, neighbours=near)
        return Encoded(blocks, prefix, time.perf_counter() - started)

    def _behind(self, count: int) -> list[Neighbours]:
        if not any(self.behind):
            raise ConfigError(
                f"neighbours={count} reads passages behind others, and these questions name none; leave it out, or set "
                "CasePassage.behind"
            )
        return [near[-count:] for near in self.behind]


def write_answer(
    lm: LanguageModel | EmbeddedModel, fused: FuseOutput, max_tokens: int, stop: Sequence[str] = ()
) -> WrittenAnswer:
    """Return the greedy answer. The cache is then restored, except for passage tokens that its method ran again."""
    mark = fused.cache.mark()
    sampling = Sampling(max_tokens=max_tokens, stop=tuple(stop))
    pieces, text, ids = Detokenizer(lm.tokenizer, sampling.stop), "", []
    eos = eos_token_ids(lm)
    never = fused.reserved_ids
    for token in decode(lm, fused.cache, fused.next_logits, fused.next_position, sampling, eos_ids=eos, never=never):
        ids.append(token)
        text += pieces.push(token)
        if pieces.stop:
            break
    text += pieces.finish()
    fused.cache.rewind(mark)
    return WrittenAnswer(text, tuple(ids))


@torch.inference_mode()
def forced_logits(lm: LanguageModel | EmbeddedModel, fused: FuseOutput, ids: Sequence[int]) -> Tensor:
    """Return the logits that predict each of `ids` given the earlier ones: float32 [len(ids), vocab_size].

    Ids that no answer may hold have -inf: a head that shares an adapter's embeddings would choose them first.
    The cache is restored afterwards.
    """
    parts = [fused.next_logits[None]]
    if len(ids) > 1:
        mark = fused.cache.mark()
        if isinstance(lm, EmbeddedModel):
            parts.append(lm.run_each(ids[:-1], fused.cache))
        else:
            parts.append(lm.run(ids[:-1], fused.next_position, fused.cache, num_logits=len(ids) - 1))
        fused.cache.rewind(mark)
    logits = torch.cat(parts)
    logits[:, sorted(lm.suppress_tokens)] = -torch.inf
    return logits
