"""A context of several turns: running text, and passages that were read apart, in any order.

Text sees everything before it, earlier passages and answers included; a passage sees itself alone. A prompt with one
group of passages is what `fuse` reads; a conversation that keeps its passages has one group a turn.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ragcache.errors import ConfigError, StaleBlockError
from ragcache.fusion.additions import NO_ADDITIONS, Additions
from ragcache.fusion.base import Exact, FusionMethod, PhaseTimes, Placement, Placer, Prefilled, place_exact
from ragcache.fusion.fuse import Fused
from ragcache.kv.block import KVBlock
from ragcache.kv.identity import Recipe
from ragcache.models.lm import LanguageModel
from ragcache.prompt import Prompt

# In the elements of a sequence a passage's tokens are others than the same tokens in running text, and its first one is
# another than the same token further on: what was read apart, and where it began, is part of what it led to.
_FIRST, _REST = 1 << 32, 2 << 32


@dataclass(frozen=True)
class Text:
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Passages:
    """Side by side: the additions of a method go before, between and behind them as in a prompt of their own."""

    chunk_ids: tuple[tuple[int, ...], ...]


class Piece(NamedTuple):
    """Consecutive tokens. start: position of the first one; apart: one passage, as its block holds it; else text."""

    start: int
    ids: tuple[int, ...]
    apart: bool

    @property
    def end(self) -> int:
        return self.start + len(self.ids)


def lay_out(parts: Sequence[Text | Passages], added: Additions, recipe: Recipe) -> list[Piece]:
    """Pieces one behind the other, with what the method adds to each group of passages; neighbouring texts are one.

    Raises ConfigError for more passages in a group than the method can read.
    """
    pieces: list[Piece] = []
    text: list[int] = []

    def add(ids: Sequence[int], *, apart: bool) -> None:
        if ids:
            pieces.append(Piece(pieces[-1].end if pieces else 0, tuple(ids), apart))

    for part in parts:
        if isinstance(part, Text):
            text += part.ids
            continue
        if added.max_chunks is not None and len(part.chunk_ids) > added.max_chunks:
            raise ConfigError(f"{len(part.chunk_ids)} passages of one turn, and the method reads {added.max_chunks}")
        own = added if part.chunk_ids else NO_ADDITIONS
        text += own.behind_prefix
        for rank, chunk in enumerate(part.chunk_ids):
            add(text, apart=False)
            add(recipe.marked(chunk), apart=True)
            text = list(own.links[rank]) if own.links else []
        text += own.behind_chunks
    add(text, apart=False)
    return pieces


def elements_of(pieces: Sequence[Piece], *, apart: bool) -> list[int]:
    """What a prefix tree knows the tokens by. apart: False reads passages as running text, as full prefill does."""
    found: list[int] = []
    for piece in pieces:
        if piece.apart and apart:
            found += [piece.ids[0] + _FIRST, *(id + _REST for id in piece.ids[1:])]
        else:
            found += piece.ids
    return found


def whole_passages(pieces: Sequence[Piece], num_tokens: int) -> int:
    """The largest part of the first `num_tokens` that ends within no passage."""
    return next((p.start for p in pieces if p.apart and p.start < num_tokens < p.end), num_tokens)


def fuse_turns(
    lm: LanguageModel,
    method: FusionMethod,
    prompt: Prompt,
    pieces: Sequence[Piece],
    blocks: Sequence[KVBlock],
    *,
    exact: Exact | None = None,
    reserve_tokens: int = 64,
) -> Fused:
    """Fused prefill of a context of several turns, by a method that `keeps_context`.

    prompt: the last turn's, with all that comes before it as its prefix; pieces: all of it, laid out
    blocks: of the passages that begin at or behind exact.num_tokens, in order
    exact:  KV that an earlier reading of the same pieces left, up to within no passage and at most to the last token

    Equals one forward pass over all ids in which every passage's tokens see that passage alone.
    Raises ConfigError (method), StaleBlockError (blocks), and what `LanguageModel.check_ids` raises.
    """
    if not method.keeps_context:
        raise ConfigError(f"method {method.name!r} cannot keep the context of earlier turns")
    known = 0 if exact is None else exact.num_tokens
    ids = [id for piece in pieces for id in piece.ids]
    lm.check_ids(ids, "the conversation")
    rest = [piece for piece in pieces if piece.end > known]
    apart = [piece for piece in rest if piece.apart]
    if [piece.end - piece.start for piece in apart] != [block.num_tokens for block in blocks]:
        raise StaleBlockError("the blocks are not those of the passages that have to be placed; pass one for each")
    running = [p for piece in rest if not piece.apart for p in range(max(piece.start, known), piece.end)]
    placements = [Placement(block, piece.start) for piece, block in zip(apart, blocks, strict=True)]
    times = PhaseTimes()
    done = _run(lm, ids, running, placements, exact if known else None, times, reserve_tokens)
    added = method.additions(lm)
    return Fused(
        prompt=prompt,
        next_logits=done.logits,
        cache=done.cache,
        timings=times,
        computed_tokens=done.computed_tokens,
        kept_tokens=done.kept_tokens,
        encoded_tokens=0,
        next_position=done.next_position,
        added_tokens=len(ids) - prompt.num_tokens,
        reserved_ids=added.reserved,
    )


def _run(
    lm: LanguageModel,
    ids: Sequence[int],
    running: Sequence[int],
    placements: Sequence[Placement],
    exact: Exact | None,
    times: PhaseTimes,
    reserve_tokens: int,
) -> Prefilled:
    """Place what is known, then the blocks, then run the tokens at these positions."""
    placer = Placer(lm, placements)

    def fill(layer: int) -> None:
        started = time.perf_counter()
        if exact is not None:
            place_exact(lm, exact, cache, layer)
        placer.place(cache, layer)
        times.place_s += time.perf_counter() - started

    cache = lm.new_cache(len(ids) + reserve_tokens, fill)
    positions = torch.tensor(running, device=lm.device)
    behind = not placements or running[0] >= placements[-1].rotate_from
    started, placed = time.perf_counter(), times.place_s
    logits = lm.run([ids[at] for at in running], positions, cache, ordered=behind)
    times.prefill_s += time.perf_counter() - started - (times.place_s - placed)
    return Prefilled.of(cache, logits, len(ids))
