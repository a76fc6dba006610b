"""Exact KV of earlier prompts, answers and system prompts, for prompts that begin with the same tokens."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import NamedTuple

from ragcache.engine.caches.generation import Generation, Seen
from ragcache.engine.caches.prefix_cache import PrefixCache, PrefixMatch, PrefixStats
from ragcache.engine.caches.prefix_nodes import Owned
from ragcache.engine.caches.stored_prefixes import StoredPrefixes
from ragcache.fusion.fuse import FuseOutput
from ragcache.fusion.layout import Layout, Segment
from ragcache.fusion.method import FusionMethod
from ragcache.kv.block_key import Recipe, digest
from ragcache.kv.buffers import SharedContext
from ragcache.kv.exact import Exact, Read, read_cache, states_behind
from ragcache.kv.fused_cache import FusedCache
from ragcache.kv.state import State
from ragcache.models.language_model import LanguageModel
from ragcache.prompt import Part
from ragcache.retrieval.retriever import Hit
from ragcache.store.documents import DocumentStore
from ragcache.store.records import NOT_STORED

log = logging.getLogger(__name__)
# Parts of passages that elements can distinguish. The part's mark is above an element's lower 34 bits, which hold a
# token's id and how it was read (`Layout.elements`).
PARTS = 1 << 28


@dataclass(frozen=True)
class Path:
    """A prompt as the prefix tree knows it.

    parts: the whole prompt; layout: the same, laid out
    hits:  its passages, in their order
    seen:  the documents when the question began
    salt:  a digest of the question's filter if the filter decides which KV its passages have, so that questions under
           another filter do not continue from this KV; otherwise ""
    """

    parts: Sequence[Part]
    layout: Layout
    hits: Sequence[Hit]
    seen: Seen
    salt: str = ""

    @property
    def passages(self) -> list[tuple[Segment, Hit]]:
        return list(zip(self.layout.passages, self.hits, strict=True))

    @property
    def elements(self) -> list[int]:
        """Return the layout's elements, marked at the first token of each passage that is only part of a passage.

        The mark identifies the whole passage and the part's place in it, because the part's KV depends on the text
        before it.
        """
        elements = self.layout.elements
        for piece, hit in self.passages:
            if self.layout.separate and hit.chunk.cut_from is not None:
                elements[piece.start] += hash(hit.chunk.cut_from) % PARTS << 34
        return elements

    @property
    def owned(self) -> list[Owned]:
        return [Owned(piece.start, piece.end, hit.chunk.vector_id) for piece, hit in self.passages]


class PrefixKV(NamedTuple):
    """KV of a prompt's first tokens.

    exact: the KV; None for no tokens
    created_tokens, encode_s: how many of these tokens ran for this question, and the seconds that this took
    load_s: seconds spent reading the KV from disk
    """

    exact: Exact | None = None
    created_tokens: int = 0
    encode_s: float = 0.0
    load_s: float = 0.0


@dataclass(eq=False, repr=False)
class Prefixes:
    """The prefix tree of a store, which knows which passages its KV was computed over. Thread-safe.

    Running text has a single namespace: a prefix that any method read serves every other method, `full` included. KV
    that a method computed over blocks serves that method alone.

    An owner of KV is a passage's vector id, which is never reused. Passages from outside the store share the owner
    NOT_STORED, and KV over them is dropped when any document changes. The same holds for KV of text in front of the
    passages, except the store's own prefix, because a conversation may quote any passage.

    own_ids: the store's own prefix
    stored:  keeps KV of running text on disk; None: it is kept in the tree alone
    """

    _lm: LanguageModel
    _documents: DocumentStore
    generation: Generation
    _recipe: Recipe
    _salt: str
    _tree: PrefixCache
    own_ids: Sequence[int] = ()
    stored: StoredPrefixes | None = None

    def of(self, salt: str) -> Prefixes:
        """Return the prefixes of another salt, in the same tree. Neither object finds the other's KV."""
        return replace(self, _salt=salt)

    @contextmanager
    def text(self, ids: Sequence[int]) -> Iterator[PrefixKV]:
        """Yield the KV of the text that a prompt begins with.

        Tokens without KV run, and their KV is kept if there is room. Raises the errors of `LanguageModel.read`.
        """
        if not ids:
            yield PrefixKV()
            return
        load_s = self._bring(self._text, ids, self._quoting(ids))
        with self._tree.match(self._text, ids) if self._tree.budget_bytes else nullcontext() as known:
            num_known = 0 if known is None else known.num_tokens
            if num_known == len(ids):
                yield PrefixKV(known, load_s=load_s)
                return
            started, seen = time.perf_counter(), self.generation.seen
            context = self._lm.read(ids, known)
            self._keep(self._text, ids, context, self._quoting(ids), seen)
            yield PrefixKV(context, len(ids) - num_known, time.perf_counter() - started, load_s)

    @contextmanager
    def exact(self, ids: Sequence[int]) -> Iterator[Exact | None]:
        """Yield the KV that `text` yields, without the time and tokens that it cost; None for no tokens."""
        with self.text(ids) as prefix:
            yield prefix.exact

    @contextmanager
    def match(self, method: FusionMethod, path: Path, most: int) -> Iterator[tuple[PrefixMatch | None, float]]:
        """Yield known KV of at most the prompt's first `most` tokens, and the seconds of reading it from disk.

        Yields None and 0 seconds if nothing is kept.
        """
        if not self._tree.budget_bytes:
            yield None, 0.0
            return
        namespace, elements = self._namespace(method, path.salt), path.elements
        load_s = self._bring(namespace, elements[:most], self._owned(path, elements))
        with self._tree.match(namespace, elements) as lease:
            lease.cut(path.layout.usable(min(lease.num_tokens, most)))
            yield lease, load_s

    def count(self, method: FusionMethod, elements: Sequence[int]) -> int:
        """Return how many of the first elements have KV in the tree. Nothing is changed."""
        return self._tree.count(self._namespace(method), elements)

    def keep(self, method: FusionMethod, path: Path, answer_ids: Sequence[int], fused: FuseOutput) -> None:
        """Keep the KV that was computed for a prompt and its answer.

        If memory is short, nothing is kept and a warning is logged: a later question takes longer, but this question
        still gets its answer.
        """
        if not self._tree.budget_bytes or len(set(fused.cache.lengths)) > 1:
            return
        elements = [*path.elements, *answer_ids][: fused.cache.get_seq_length()]
        self._keep(self._namespace(method, path.salt), elements, fused.cache, self._owned(path, elements), path.seen)

    def pin(self, method: FusionMethod | None, elements: Sequence[int], ttl_s: float) -> int:
        """Keep known KV of a prompt's first tokens from eviction; return the number of tokens. See `PrefixCache.pin`.

        method: the method that computed the KV; None: it is KV of running text
        """
        if not self._tree.budget_bytes:
            return 0
        return self._tree.pin(self._text if method is None else self._namespace(method), elements, ttl_s)

    def _keep(
        self,
        namespace: str,
        elements: Sequence[int],
        cache: FusedCache | SharedContext,
        owned: Sequence[Owned],
        seen: Seen,
    ) -> None:
        if not self._tree.budget_bytes:
            return
        self._insert(namespace, elements, read_cache(cache), owned, seen, states_behind(cache, len(elements)))
        if self.stored is not None and namespace == self._text:
            self.stored.keep(namespace, elements, seen.number)

    def _bring(self, namespace: str, elements: Sequence[int], owned: Sequence[Owned]) -> float:
        """Read KV that the tree lacks from disk into the tree, up to the tree's budget. Return the seconds it took."""
        if self.stored is None or namespace != self._text:
            return 0.0
        started, seen = time.perf_counter(), self.generation.seen
        wanted = elements[: self._tree.budget_bytes // self._tree.token_bytes]
        found = self.stored.load(namespace, wanted, self._tree.count(namespace, wanted), seen.number)
        if found is not None:
            self._insert(namespace, wanted[: found.num_tokens], found.read, owned, seen)
        return time.perf_counter() - started

    def _insert(
        self,
        namespace: str,
        elements: Sequence[int],
        read: Read,
        owned: Sequence[Owned],
        seen: Seen,
        states: Sequence[State] = (),
    ) -> None:
        """Insert KV into the tree; then drop KV of passages that were deleted since its computation began.

        If the tree cannot take the KV, a warning is logged.

        seen: the state of the documents when the computation began
        """
        try:
            self._tree.insert(namespace, elements, read, owned, states)
        except (MemoryError, RuntimeError, LookupError) as error:  # torch raises RuntimeError if it is out of memory
            log.warning("the KV of a prompt is not kept for later ones: %s", error)
        owners, changed = {one.owner for one in owned}, seen is not self.generation.seen
        self._drop_gone(owners if changed else owners - {NOT_STORED}, changed=changed)

    def _owned(self, path: Path, elements: Sequence[int]) -> list[Owned]:
        """Return the owners of a prompt's tokens: its passages, and NOT_STORED for text before the first passage.

        elements: elements of the prompt, with or without its answer
        """
        before = elements[: path.owned[0].start] if path.owned else elements
        return [*self._quoting(before), *path.owned]

    def _quoting(self, ids: Sequence[int]) -> list[Owned]:
        """Return the span of text that may quote any passage: everything after the store's own prefix."""
        pairs = enumerate(zip(ids, self.own_ids, strict=False))
        start = next((at for at, (one, own) in pairs if one != own), min(len(ids), len(self.own_ids)))
        return [Owned(start, len(ids), NOT_STORED)] if start < len(ids) else []

    def invalidate(self) -> None:
        """Drop all KV computed over deleted or foreign passages, or over text that may quote them (law 10)."""
        self._drop_gone(self._tree.owners(), changed=True)

    def stats(self) -> PrefixStats:
        return self._tree.stats()

    def clear(self) -> None:
        if self.stored is not None:
            self.stored.close()
        self._tree.clear()

    def _drop_gone(self, owners: set[int], *, changed: bool) -> None:
        """Drop KV of those owners that are not in the store.

        changed: whether documents changed since the KV was computed. In a store with neighbours, KV of all `owners` is
                 then dropped, because a passage that is still stored may have been encoded after a deleted neighbour
        """
        trusted = set() if changed and self._recipe.neighbours else owners
        present = {chunk.vector_id for chunk in self._documents.chunks_by_vector_ids(trusted)}
        if gone := owners - present:
            self._tree.drop(gone)

    def _namespace(self, method: FusionMethod, salt: str = "") -> str:
        return self._named(f"{method!r} over {self._recipe!r}{salt}") if method.reuses_blocks else self._text

    @property
    def _text(self) -> str:
        return self._named("text")

    def _named(self, how: str) -> str:
        return digest({"fingerprint": self._lm.fingerprint, "salt": self._salt, "how": how})
