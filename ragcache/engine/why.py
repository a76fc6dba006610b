"""Says why each passage of a prompt is, or is not, read from stored KV. Nothing is read, computed or changed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from ragcache.engine.answer import Reason
from ragcache.engine.assemble import Components
from ragcache.engine.caches.prefix_nodes import common_length
from ragcache.engine.verdict import Choice
from ragcache.prompt import Prompt
from ragcache.store.foreign import WINDOW, window_hashes
from ragcache.store.records import NOT_STORED, Chunk

SHOWN_TOKENS = 6
MOST_COMPARED = 200_000
"""The most stored passages that a prompt's text is compared with, the oldest first."""
Ids = NDArray[np.int64]


def explain_read(
    parts: Components, prompt: Prompt, choice: Choice, read: Sequence[tuple[Chunk, str | None]], last: int | None = None
) -> list[Reason]:
    """Return the reasons of a prompt; see `RagCache.why`.

    Args:
        parts: The store's parts.
        prompt: The prompt.
        choice: The method that reads it.
        read: Its passages, each with the tier of its KV; None: it was in no tier.
        last: Number of the last passage that the list of foreign passages had before the prompt was read; None: the
            prompt was not read.
    """
    row = np.asarray(prompt.ids, np.int64)
    near = _differing(parts, row, {chunk.vector_id for chunk, _ in read} - {NOT_STORED})
    return [*(_reason(parts, choice, chunk, tier, last) for chunk, tier in read), *near]


def _reason(parts: Components, choice: Choice, chunk: Chunk, tier: str | None, last: int | None) -> Reason:
    kv, name = parts.store.kv, chunk.id or chunk.text[:40]
    if not choice.method.reuses_blocks:
        return Reason(name, "method cannot", f"{choice.label} reads every token: {choice.why}")
    if tier is not None:
        return Reason(name, "found", tier)
    (key,) = parts.block_keys.keys([chunk])
    if chunk.vector_id != NOT_STORED:
        if chunk.handle is None:
            return Reason(name, "never stored", "its document was added without KV, which is computed at the first use")
        return Reason(name, "evicted" if chunk.handle == key else "another model")
    owners = set() if kv.passages is None else kv.passages.owners(chunk.whole.token_ids, last)
    if parts.block_keys.owner in owners:
        return Reason(name, "evicted")
    # Only a view of the whole store may learn that the passage has other owners: they may be other collections.
    is_whole = parts.store.documents.view.reads is None
    return Reason(name, "another model" if owners and is_whole else "never stored")


def _differing(parts: Components, row: Ids, read: set[int]) -> list[Reason]:
    """Return a reason "differs" for each stored passage that occurs in `row` only in part.

    At least half of the passage's windows of tokens have to occur there.

    row:  the prompt's ids
    read: vector ids of the prompt's own passages, which are left out
    """
    if len(row) < WINDOW:
        return []
    hashes = window_hashes(row)
    found: list[Reason] = []
    for vector_id, own in _stored(parts):
        if len(own) < WINDOW or vector_id in read:
            continue
        theirs = window_hashes(own)
        known = np.isin(theirs, hashes)
        if 2 * known.sum() < len(known):
            continue
        first = int(np.flatnonzero(known)[0])
        shift = int(np.flatnonzero(hashes == theirs[first])[0]) - first
        place = _first_difference(own, row, shift, first)
        if place is None:
            continue
        chunks = [] if vector_id is None else parts.store.documents.chunks_by_vector_ids([vector_id])
        decode = parts.card.tokenizer.decode
        start, stop = max(0, place - SHOWN_TOKENS), place + SHOWN_TOKENS
        stored, here = decode(own[start:stop]), decode(row[max(0, start + shift) : max(0, stop + shift)])
        name = chunks[0].id if chunks else str(decode(own[:SHOWN_TOKENS]))
        found.append(Reason(name, "differs", f"stored {stored!r}, in the prompt {here!r}", place))
    return found


def _first_difference(own: Ids, row: Ids, shift: int, first: int) -> int | None:
    """Return the number of the passage's first token that differs in the prompt, or None if all tokens are there.

    own:   the passage's ids
    row:   the prompt's ids
    shift: where the passage would begin in the prompt, so that its window at `first`, which both have, lies there
    """
    for place in range(first):
        if place + shift < 0 or row[place + shift] != own[place]:
            return place
    end = first + common_length(own[first:], row[first + shift :])
    return None if end == len(own) else end


def _stored(parts: Components) -> Iterator[tuple[int | None, Ids]]:
    """Yield vector id and token ids of stored passages, at most MOST_COMPARED; None as the id: of no document."""
    left = MOST_COMPARED
    for batch in parts.store.documents.token_ids():
        for vector_id, ids in batch[:left]:
            yield vector_id, np.asarray(ids, np.int64)
        left -= len(batch)
        if left <= 0:
            return
    passages = parts.store.kv.passages
    for _, ids in [] if passages is None else passages.passages(parts.block_keys.owner)[:left]:
        yield None, np.asarray(ids, np.int64)
