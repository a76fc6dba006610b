"""Exact KV of earlier prompts and answers, for prompts that begin with the same tokens."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ragcache.fusion.base import FusionMethod
from ragcache.fusion.fuse import Fused
from ragcache.kv.identity import digest
from ragcache.kv.prefix_tree import Lease, Owned, PrefixStats, PrefixTree, read_cache
from ragcache.models.lm import LanguageModel
from ragcache.prompt import Prompt
from ragcache.retrieval.retriever import Hit
from ragcache.store.documents import DocumentStore
from ragcache.store.records import NOT_STORED

log = logging.getLogger(__name__)


class Prefixes:
    """The prefix tree of one store, which knows which passages its KV was computed over. Thread-safe.

    A passage is named by its vector id, which is never given to another one; those from outside the store share one
    name and go, as their blocks do, when any document changes.
    """

    def __init__(self, lm: LanguageModel, documents: DocumentStore, tenant: str, budget_bytes: int) -> None:
        """Raises ConfigError for a budget that is negative or too small for one token."""
        self._lm = lm
        self._documents = documents
        self._tenant = tenant
        self._tree = PrefixTree(lm.shape, budget_bytes)

    def match(self, method: FusionMethod, prompt: Prompt, *, whole_suffix: bool) -> Lease | None:
        """What is known of the prompt's first tokens: all but the last at most, or none of the suffix. None for a
        method that cannot use it."""
        if not method.takes_exact or not self._tree.budget_bytes:
            return None
        lease = self._tree.match(self._namespace(method), prompt.ids)
        lease.cut(prompt.context_tokens if whole_suffix else prompt.num_tokens - 1)
        return lease

    def keep(
        self, method: FusionMethod, prompt: Prompt, hits: Sequence[Hit], answer_ids: Sequence[int], fused: Fused
    ) -> None:
        """Remember what was computed for a prompt over these passages, and for its answer.

        Where memory is short nothing is, with a warning: it costs a later question time, never this one its answer.
        """
        if not method.takes_exact or not self._tree.budget_bytes or len(set(fused.cache.lengths)) > 1:
            return
        ids = [*prompt.ids, *answer_ids][: fused.cache.get_seq_length()]
        owned = _owned(prompt, hits)
        try:
            self._tree.insert(self._namespace(method), ids, read_cache(fused.cache), owned)
        except (MemoryError, RuntimeError) as error:  # torch raises RuntimeError when it finds no memory
            log.warning("the KV of a prompt is not kept for later ones: %s", error)
        self._drop_gone({one.owner for one in owned} - {NOT_STORED})

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
        return digest({"fingerprint": self._lm.fingerprint, "tenant": self._tenant, "method": repr(method)})


def _owned(prompt: Prompt, hits: Sequence[Hit]) -> list[Owned]:
    owned, start = [], len(prompt.prefix_ids)
    for hit, ids in zip(hits, prompt.chunk_ids, strict=True):
        owned.append(Owned(start, start + len(ids), hit.chunk.vector_id))
        start += len(ids)
    return owned
