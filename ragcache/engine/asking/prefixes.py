"""Exact KV of earlier prompts and answers, for prompts that begin with the same tokens."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from ragcache.fusion.base import FusionMethod
from ragcache.fusion.fuse import Fused
from ragcache.fusion.layout import Layout, Piece
from ragcache.kv.identity import Recipe, digest
from ragcache.kv.prefix_tree import Lease, Owned, PrefixStats, PrefixTree, read_cache
from ragcache.models.lm import LanguageModel
from ragcache.prompt import Part
from ragcache.retrieval.retriever import Hit
from ragcache.store.documents import DocumentStore
from ragcache.store.records import NOT_STORED

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Path:
    """A prompt as the tree knows it.

    parts: all of it; layout: the same, laid out
    hits:  its passages, in their order, of which the last `asked` are this question's
    """

    parts: Sequence[Part]
    layout: Layout
    hits: Sequence[Hit]
    asked: int

    @property
    def passages(self) -> list[tuple[Piece, Hit]]:
        return list(zip(self.layout.passages, self.hits, strict=True))

    @property
    def owned(self) -> list[Owned]:
        return [Owned(piece.start, piece.end, hit.chunk.vector_id) for piece, hit in self.passages]


class Prefixes:
    """The prefix tree of one store, which knows which passages its KV was computed over. Thread-safe.

    A passage is named by its vector id, which is never given to another one; those from outside the store share one
    name and go, as their blocks do, when any document changes.
    """

    def __init__(
        self, lm: LanguageModel, documents: DocumentStore, recipe: Recipe, tenant: str, tree: PrefixTree
    ) -> None:
        self._lm = lm
        self._documents = documents
        self._recipe = recipe
        self._tenant = tenant
        self._tree = tree

    def match(self, method: FusionMethod, path: Path, most: int) -> Lease | None:
        """What is known of the prompt's first tokens, `most` of them at most; None where nothing is kept."""
        if not self._tree.budget_bytes:
            return None
        lease = self._tree.match(self._namespace(method), path.layout.elements)
        lease.cut(path.layout.usable(min(lease.num_tokens, most)))
        return lease

    def count(self, method: FusionMethod, elements: Sequence[int]) -> int:
        """Tokens of a beginning that are known; changes nothing."""
        return self._tree.count(self._namespace(method), elements)

    def keep(self, method: FusionMethod, path: Path, answer_ids: Sequence[int], fused: Fused) -> None:
        """Remember what was computed for a prompt and its answer.

        Where memory is short nothing is, with a warning: it costs a later question time, never this one its answer.
        """
        if not self._tree.budget_bytes or len(set(fused.cache.lengths)) > 1:
            return
        elements = [*path.layout.elements, *answer_ids][: fused.cache.get_seq_length()]
        try:
            self._tree.insert(self._namespace(method), elements, read_cache(fused.cache), path.owned)
        except (MemoryError, RuntimeError) as error:  # torch raises RuntimeError when it finds no memory
            log.warning("the KV of a prompt is not kept for later ones: %s", error)
        self._drop_gone({one.owner for one in path.owned} - {NOT_STORED})

    def drop_deleted(self) -> None:
        """Let go of all that was computed over passages that are gone, and over those from outside (law 10)."""
        self._drop_gone(self._tree.owners())

    def stats(self) -> PrefixStats:
        return self._tree.stats()

    def clear(self) -> None:
        self._tree.clear()

    def _drop_gone(self, owners: set[int]) -> None:
        present = {chunk.vector_id for chunk in self._documents.chunks_by_vector_ids(owners)}
        if gone := owners - present:
            self._tree.drop(gone)

    def _namespace(self, method: FusionMethod) -> str:
        how = f"{method!r} over {self._recipe!r}"
        return digest({"fingerprint": self._lm.fingerprint, "tenant": self._tenant, "how": how})
