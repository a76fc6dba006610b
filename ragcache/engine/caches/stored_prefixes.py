"""Prefixes of prompts on disk, so that a conversation can continue after the store was closed.

Tokens of a prompt and its answer that are not stored yet become blocks of at most 256 tokens in the cache of foreign
passages. Each is keyed by all tokens up to its end and by everything else that its KV depends on. Keys stay rotated to
their original positions.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ragcache.engine.caches.generation import Generation
from ragcache.engine.caches.prefix_cache import PrefixCache, PrefixMatch
from ragcache.engine.caches.prefix_nodes import common_length
from ragcache.engine.loader import BlockLoader
from ragcache.errors import StoreError
from ragcache.kv.block import KVBlock
from ragcache.runtime import Background
from ragcache.store.foreign import PREFIX, Listed, PassageList
from ragcache.store.kv_store import KVStore
from ragcache.store.warn_once import WarnOnce

log = logging.getLogger(__name__)
PIECE_TOKENS = 256
# Fewer new tokens are not worth a read. They are written together with the tokens that follow them in a later prompt.
LEAST_TOKENS = 16
# Fewer new tokens are not worth a read during a write, because the reader may have to wait until the write ends.
_WORTH_WAITING = 64
# Most prompts that wait to be written. Further prompts are not kept, so that the queue cannot outgrow the disk's rate.
_MOST_WAITING = 16


class _Piece(NamedTuple):
    """A stored block and the part of a prompt that it serves: tokens [start, stop). The block may hold more tokens."""

    key: str
    start: int
    stop: int


class StoredKV(NamedTuple):
    """Consecutive blocks that were read, each with the prompt's tokens that it serves."""

    parts: list[tuple[_Piece, KVBlock]]

    @property
    def num_tokens(self) -> int:
        return self.parts[-1][0].stop

    def read(self, layer: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return a layer's keys and values; see `ragcache.kv.exact.Read`.

        Raises LookupError for tokens before these blocks.
        """
        if start < self.parts[0][0].start:
            raise LookupError("the prefix tree has dropped the KV of the tokens before the stored KV")
        keys, values = [], []
        for (_, first, last), block in self.parts:
            begin, end = max(start, first) - first, min(stop, last) - first
            if begin < end:
                keys.append(block.layer_keys(layer)[:, begin:end])
                values.append(block.layer_values(layer)[:, begin:end])
        return torch.cat(keys, 1), torch.cat(values, 1)


@dataclass(eq=False, repr=False)
class StoredPrefixes:
    """Reads and writes prefixes on disk. Thread-safe; `close` it before the store.

    Prefixes that may quote a changed document are deleted with it (law 10): their owners contain the documents'
    generation, and `collect_garbage` deletes the prefixes of earlier generations.

    _blocks, _list: the blocks and the list of passages that belong to no document, among which prefixes are kept
    """

    _tree: PrefixCache
    _generation: Generation
    _loader: BlockLoader
    _blocks: KVStore
    _list: PassageList

    def __post_init__(self) -> None:
        self._writer = Background(name="ragcache-prefix", most=_MOST_WAITING)
        self._complaints = WarnOnce(log)
        self._writing = False

    def load(self, namespace: str, ids: Sequence[int], known: int, generation: int) -> StoredKV | None:
        """Return the stored KV of the prompt's tokens after the first `known`, up to where computing becomes faster
        than reading.

        Returns None if the stored KV has too few new tokens to be worth a read, or if reading fails, which is logged.
        Raises CancelledError and TimedOutError within `deadline.limited`.
        """
        least = _WORTH_WAITING if self._writing else LEAST_TOKENS
        if len(ids) - known < least:
            return None
        try:
            pieces = [one for one in self._walk(namespace, ids, generation) if one.stop > known]
            if not pieces or pieces[-1].stop - known < least:
                return None
            blocks = self._loader.load_chain([(one.key, one.stop - max(one.start, known)) for one in pieces])
        except StoreError as error:
            self._complaints.failed("KV of prompts is not read from disk", error)
            return None
        return StoredKV(list(zip(pieces, blocks, strict=False))) if blocks else None

    def keep(self, namespace: str, ids: Sequence[int], generation: int) -> None:
        """Queue the tree's KV of these tokens to be written in another thread, as far as it is not stored yet.

        Nothing is written to a store that is open read-only, or if too many prompts wait.
        """
        if not self._blocks.read_only:
            self._writer.submit(self._write, namespace, list(ids), generation)

    def close(self) -> None:
        """Write the KV of all prompts that wait, and end the thread. May be called twice."""
        self._writer.close()

    def _walk(self, namespace: str, ids: Sequence[int], generation: int) -> list[_Piece]:
        """Return the stored blocks of the prompt's beginning, in order. Only the first tokens of the last may serve."""
        wanted, chain, pieces, at = _array(ids), hashlib.sha256(namespace.encode()), list[_Piece](), 0
        while at < len(wanted):
            owner = _owner(chain, wanted[at], generation)
            rows = [(common_length(own, wanted[at:]), _key(owner, own)) for _, own in self._list.passages(owner)]
            used, key = max((row for row in rows if row[1] in self._blocks), default=(0, ""))
            if not used:
                break
            pieces.append(_Piece(key, at, at + used))
            chain.update(wanted[at : at + used].tobytes())
            at += used
        return pieces

    def _write(self, namespace: str, ids: Sequence[int], generation: int) -> None:
        self._writing = True
        try:
            with self._tree.match(namespace, ids, counted=False) as held:
                self._write_rest(namespace, ids[: held.num_tokens], generation, held)
            self._complaints.worked()
        except Exception as error:  # a failure only slows a later question
            self._complaints.failed("the KV of a prompt is not kept on disk", error)
        finally:
            self._writing = False

    def _write_rest(self, namespace: str, ids: Sequence[int], generation: int, held: PrefixMatch) -> None:
        pieces, all_ids = self._walk(namespace, ids, generation), _array(ids)
        start = pieces[-1].stop if pieces else 0
        if len(ids) - start < LEAST_TOKENS or self._generation.current() != generation:
            return
        chain = hashlib.sha256(namespace.encode() + all_ids[:start].tobytes())
        rows, starts = [], range(start, len(ids), PIECE_TOKENS)
        for at in starts:
            own = all_ids[at : at + PIECE_TOKENS]
            owner = _owner(chain, own[0], generation)
            rows.append(Listed(_key(owner, own), owner, own.tolist()))
            chain.update(own.tobytes())
        blocks = (held.block(at, at + len(row.token_ids)) for at, row in zip(starts, rows, strict=True))
        self._loader.kv.keep_prefixes(rows, blocks, generation, self._generation.current)


def _array(ids: Sequence[int]) -> NDArray[np.int32]:
    return np.asarray(ids, np.dtype("<i4"))


def _owner(chain: hashlib._Hash, first: np.int32, generation: int) -> str:
    """Return the owner of the blocks that continue the chain's tokens with the token `first`: usually a single block.

    chain: a hash of the namespace and all tokens before `first`
    """
    hashed = chain.copy()
    hashed.update(first.tobytes())
    return f"{PREFIX}{generation}:{hashed.hexdigest()}"


def _key(owner: str, ids: NDArray[np.int32]) -> str:
    return hashlib.sha256(owner.encode() + ids.tobytes()).hexdigest()
