"""A small store that is read whole (CAG, arXiv 2412.15605): exact KV of every passage, kept as a single block.

All passages follow the prompts' beginning, in the order of their documents' ids. A block of all these tokens, read
alone, equals the KV of a plain pass over the prompt. It is kept on disk like prompts' prefixes, bit for bit, until any
document changes (law 10).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ragcache.engine.caches.generation import Generation
from ragcache.engine.caches.prefixes import PrefixKV
from ragcache.engine.options import RetrieveOptions, names
from ragcache.engine.prompts import Prompts
from ragcache.errors import ConfigError, ContextTooLongError, StoreError
from ragcache.fusion.method import FusionMethod
from ragcache.ingest.encoder import ModelEncoder, OnEncoded
from ragcache.kv.block_key import digest
from ragcache.kv.exact import ExactBlock
from ragcache.models.language_model import LanguageModel
from ragcache.prompt import PromptEnds
from ragcache.retrieval.retriever import Hit
from ragcache.store.documents import DocumentStore
from ragcache.store.foreign import PREFIX, Listed
from ragcache.store.kv_store import KVStore

log = logging.getLogger(__name__)


class WholeStore:
    """Loads or computes the KV of a prompt's beginning and all passages. Thread-safe."""

    def __init__(
        self, lm: LanguageModel, kv: KVStore, generation: Generation, salt: str, on_encoded: OnEncoded | None = None
    ) -> None:
        # Separate salt: a passage with the same tokens may be stored by a lossy codec.
        self._encoder = ModelEncoder(lm, salt=digest({"whole": salt}), on_encoded=on_encoded)
        self._lm = lm
        self._kv = kv
        self._generation = generation

    def of(self, salt: str, on_encoded: OnEncoded) -> WholeStore:
        """Return the same for another salt."""
        return WholeStore(self._lm, self._kv, self._generation, salt, on_encoded)

    def read(self, ids: Sequence[int], generation: int) -> PrefixKV:
        """Load the KV of these tokens, or compute and keep it.

        Args:
            generation: of the documents whose passages these tokens are

        Raises CancelledError and TimedOutError inside a `deadline.limited` block.
        """
        started, handle, lm = time.perf_counter(), self._encoder.key(ids), self._lm
        loaded = None if self._kv.foreign is None else self._kv.foreign.get(handle)
        if loaded is not None:
            return PrefixKV(ExactBlock(loaded.block, lm.rope, lm.shape), load_s=time.perf_counter() - started)
        (block,) = self._encoder.encode([ids])
        encode_s = time.perf_counter() - started
        try:  # if this fails, only a later question takes longer
            rows = [Listed(handle, f"{PREFIX}{generation}:whole", ids)]
            self._kv.keep_prefixes(rows, [block], generation, self._generation.current)
        except StoreError as error:
            log.warning("the KV of the whole store is not kept on disk: %s", error)
        return PrefixKV(ExactBlock(block, lm.rope, lm.shape), len(ids), encode_s)


def check_whole(options: Mapping[str, Any], method: FusionMethod) -> None:
    """Raise ConfigError for options and methods that cannot be combined with reading everything."""
    defaults = {"search": "vector", "order": "relevance"}
    chosen = {name: options.get(name) for name in ("hits", *names(RetrieveOptions), "order")}
    given = [name for name, value in chosen.items() if value is not None and value != defaults.get(name)]
    if given:
        raise ConfigError(f"whole reads every passage of the store, in its order; leave out {', '.join(given)}")
    if method.reuses_blocks or not method.takes_exact:
        raise ConfigError(
            f"whole goes on from exact KV, which method {method.name!r} does not; choose full, or leave the method out"
        )


def whole_hits(documents: DocumentStore, prompts: Prompts, ends: PromptEnds) -> list[Hit]:
    """Return every passage, by document id and then in order.

    Raises ContextTooLongError before reading any passage if they do not fit the model.
    """
    counts, most = documents.counts(), prompts.lm.max_positions
    total = counts.tokens + len(ends.prefix_ids) + len(ends.suffix_ids)
    if total > most:
        raise ContextTooLongError(
            f"the whole store has {counts.chunks} passages of {counts.tokens} tokens, {total} with the question, and "
            f"{prompts.lm.name} takes {most}; ask without whole, for the passages nearest to the question"
        )
    chunks = [chunk for one in documents.documents() for chunk in documents.chunks_of(one.id, one.collection)]
    return [Hit(chunk, 0.0, chunk.handle) for chunk in chunks]
