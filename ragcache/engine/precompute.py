"""Computes the KV of passages that stay in a list, in a vector store, or in a retriever's index.

Only the KV is computed, with the data to find it again and to name its origin: no embedding, no copy of the text. It is
kept with that of other foreign passages (`ragcache/store/foreign.py`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from ragcache.engine.attach import collection_of, find_adapter
from ragcache.engine.passages import Passage, text_field
from ragcache.errors import ConfigError, ContextTooLongError, PromptError, StoreReadOnlyError
from ragcache.ingest.document import Document
from ragcache.ingest.encoder import ModelEncoder
from ragcache.ingest.report import Failure, Progress, ProgressEvent, bytes_text
from ragcache.models.batches import plan_batches
from ragcache.models.deadline import LIMIT, Limit, limited
from ragcache.retrieval.retriever import Hit
from ragcache.store.foreign import NOBODY, OWNER, Listed, Name, PassageList
from ragcache.store.kv_store import KVStore
from ragcache.store.records import NOT_STORED, Chunk

if TYPE_CHECKING:
    from ragcache.engine.assemble import Components

log = logging.getLogger(__name__)
_GROUP = 64  # texts that are processed together


@dataclass
class PrecomputeReport:
    """Result of a precomputation.

    handles:  of the passages, in their order; None for a passage that failed, or is not computed (dry_run)
    computed: passages that the model read now, with `tokens` tokens
    known:    passages whose KV was already present
    failed:   passages that the model cannot read, and why
    forgotten: handles whose KV was removed because nothing refers to it
    kv_bytes: size of these passages' KV on disk; budget_bytes: its limit (`StoreConfig.foreign_cache`)
    evicted:  passages whose KV did not fit or was evicted for other KV; evicted_bytes: its size
    warning:  the setting to raise if KV did not fit; "" if all of it did
    """

    handles: list[str | None] = field(default_factory=list)
    computed: int = 0
    tokens: int = 0
    known: int = 0
    failed: list[Failure] = field(default_factory=list)
    forgotten: list[str] = field(default_factory=list)
    elapsed_s: float = 0.0
    kv_bytes: int = 0
    budget_bytes: int = 0
    evicted: int = 0
    evicted_bytes: int = 0
    warning: str = ""

    @property
    def kv_text(self) -> str:
        """Return kv_bytes and the budget in words."""
        return f"their KV takes {bytes_text(self.kv_bytes)} of {bytes_text(self.budget_bytes)} (--foreign-cache)"


class Precompute:
    """Computes and removes the KV of passages that belong to no document of the store."""

    def __init__(self, parts: Components) -> None:
        self._parts = parts
        self._encoder: ModelEncoder = parts.block_keys.encoder
        self._learnt = (OWNER + self._encoder.owner,)
        self._kv = parts.store.kv
        self._blocks, self._list = _foreign(self._kv)
        self._is_read_only = self._kv.read_only
        self._sizes: dict[str, int] = {}

    def run(
        self,
        given: Any,
        *,
        collection: str = "",
        sync: bool = False,
        dry_run: bool = False,
        progress: Progress | None = None,
        cancelled: threading.Event | None = None,
    ) -> PrecomputeReport:
        """Compute the KV of passages; see `RagCache.precompute`."""
        if self._is_read_only and not dry_run:
            raise StoreReadOnlyError("the store is open to be read only; precompute writes KV: open it without that")
        started, report, ids = time.perf_counter(), PrecomputeReport(), set[str]()
        collection, evictions = collection or collection_of(given), self._blocks.evictions
        with limited(Limit(cancelled)):
            texts = _texts(given)
            while group := list(islice(texts, _GROUP)):
                LIMIT.get().check()
                ids |= self._group(group, collection, report, sync, dry_run)
                if progress is not None:
                    progress(ProgressEvent("encode", len(report.handles), len(report.handles)))
        if sync and not dry_run:
            gone = {name.id for name in self._list.names(collection)} - ids
            self._remove(self._list.unname(collection, gone), report)
        self._weigh(report, warns=self._blocks.evictions > evictions)
        report.elapsed_s = time.perf_counter() - started
        return report

    def forget(self, ids: Iterable[str], sources: Iterable[str], given: Any, collection: str) -> list[str]:
        """Remove the KV of passages; see `RagCache.forget`."""
        if self._is_read_only:
            raise StoreReadOnlyError("the store is open to be read only; forget removes KV: open it without that")
        report = PrecomputeReport()
        gone = self._list.unname(collection, ids, sources)
        if given is not None:
            chunks = [self._chunk(text.text) for text in _texts(given) if text.text.strip()]
            keys = self._encoder.keys(chunks)
            gone += self._list.unlearn((self._learnt, chunk.token_ids) for chunk in chunks)
            gone += self._list.unname(collection, keys)
            gone += self._list.unname(NOBODY, keys)
            gone += self._list.unnamed(keys)
        self._remove(gone, report)
        return report.forgotten

    def _group(
        self, group: Sequence[Document], collection: str, report: PrecomputeReport, sync: bool, dry_run: bool
    ) -> set[str]:
        """Compute the KV of a group of texts; return the ids that name them in the collection.

        In a collection, a text without an id is named by its handle. Without a collection, nothing names it.
        """
        read = [self._read(text, report) for text in group]
        chunks = [chunk for chunk in read if chunk is not None]
        keys = iter(self._encoder.keys(chunks))
        handles = [None if chunk is None else next(keys) for chunk in read]
        by_key = {key: chunk for key, chunk in zip(handles, read, strict=True) if key is not None and chunk is not None}
        there = self._there(by_key, listed=not dry_run)
        missing = {key: chunk for key, chunk in by_key.items() if key not in there}
        report.known += sum(1 for key in handles if key in there)
        if dry_run:
            report.handles += [key if key in there else None for key in handles]
            return set()
        self._compute(missing, report)
        pairs = [(text, key) for text, key in zip(group, handles, strict=True) if key is not None]
        named = [
            Name(text.id or (key if collection or sync else ""), text.source, key, text.title, text.metadata)
            for text, key in pairs
        ]
        names = {name.id: name for name in named if name.id}
        gone = self._list.name(collection, names.values())
        if unnamed := [
            name._replace(id=name.handle) for name in named if not name.id and (name.title or name.metadata)
        ]:
            self._list.name(NOBODY, unnamed)
        gone += self._list.unname(collection, {text.id for text in group if text.id} - names.keys())
        self._remove(gone, report)
        report.handles += handles
        return set(names)

    def _read(self, text: Document, report: PrecomputeReport) -> Chunk | None:
        """Return the passage as the model reads it, or None if the model cannot read it."""
        try:
            if not text.text.strip():
                raise PromptError(f"passage {text.id!r} has no text; leave empty passages out")
            chunk = self._chunk(text.text)
            self._encoder.check(chunk.token_ids, text.id or "a passage")
        except (PromptError, ContextTooLongError) as error:
            report.failed.append(Failure(text.id, error))
            return None
        return chunk

    def _chunk(self, text: str) -> Chunk:
        ids = self._parts.whole.encode([text])[0]
        return Chunk("", "", 0, text, ids, {}, NOT_STORED, None, 0.0, "", "")

    def _there(self, by_key: dict[str, Chunk], *, listed: bool) -> set[str]:
        """Return the keys whose KV is stored, either with the store's documents or in the foreign store.

        listed: also add those in the foreign store to its list of passages
        """
        own = self._parts.store.documents.referenced(by_key)
        own = set(self._kv.lookup(own, "durable"))
        here = {key: stored.num_bytes for key, stored in self._blocks.lookup(by_key.keys() - own).items()}
        self._sizes |= here
        for key, size in here.items() if listed else ():
            self._list.add(Listed(key, self._encoder.owner, by_key[key].token_ids, size))
        return own | here.keys()

    def _compute(self, missing: dict[str, Chunk], report: PrecomputeReport) -> None:
        keys = list(missing)
        for batch in plan_batches([missing[key].num_tokens for key in keys], self._encoder.batch_tokens):
            members = [missing[keys[rank]] for rank in batch]
            whole = self._encoder.with_neighbours(members)
            made = self._encoder.encode([chunk.token_ids for chunk in whole], [chunk.neighbours for chunk in whole])
            for rank, chunk, block in zip(batch, members, made, strict=True):
                held = self._blocks.put(keys[rank], self._kv.put(keys[rank], block, "nowhere"))
                self._list.add(Listed(keys[rank], self._encoder.owner, chunk.token_ids, held.num_bytes))
                self._sizes[keys[rank]] = held.num_bytes
                report.computed += 1
                report.tokens += chunk.num_tokens

    def _remove(self, handles: Iterable[str], report: PrecomputeReport) -> None:
        """Remove KV from every tier, and pieces learnt from prompts that quote its text. Documents keep their KV."""
        gone = list(dict.fromkeys(handles))
        gone += self._list.unlearn((self._learnt, ids) for ids in self._list.token_ids(gone)) if gone else []
        gone = list(dict.fromkeys(gone))
        own = self._parts.store.documents.referenced(gone) if gone else set()
        for handle in gone:
            if handle not in own:
                self._kv.delete(handle)
            elif self._blocks.root.exists():
                self._blocks.delete(handle)
                self._list.remove(handle)
        if gone:
            self._parts.generation.invalidate()
            report.forgotten += gone

    def _weigh(self, report: PrecomputeReport, *, warns: bool) -> None:
        """Add the size of the KV and the evictions to the report. warns: whether any KV was evicted during the run"""
        for key in report.forgotten:
            self._sizes.pop(key, None)
        there = self._blocks.lookup(self._sizes)
        lost = [size for key, size in self._sizes.items() if key not in there]
        report.kv_bytes = sum(stored.num_bytes for stored in there.values())
        report.budget_bytes = self._blocks.disk_bytes or 0
        report.evicted, report.evicted_bytes = len(lost), sum(lost)
        usage = self._kv.foreign_usage() if warns or lost else None
        if usage is None or not (lost or usage.evicted):
            return
        count, size = max(usage.evicted, len(lost)), max(usage.evicted_bytes, report.evicted_bytes)
        report.warning = (
            f"foreign_cache is too small: KV of {count} passages ({bytes_text(size)}) did not fit or was evicted, that "
            f"of {usage.passages} ({bytes_text(usage.bytes)}) is kept; raise StoreConfig(foreign_cache=...) or "
            f"--foreign-cache from {bytes_text(usage.budget_bytes)} to more than "
            f"{bytes_text(usage.bytes + usage.prompt_bytes + size)}"
        )
        if lost or count > 2 * self._list.reported:
            self._list.reported = count
            log.warning("%s", report.warning)


def _foreign(kv: KVStore) -> tuple[KVStore, PassageList]:
    if kv.foreign is None or kv.passages is None:
        raise ConfigError(
            "foreign_cache is 0: there is no place for KV of passages that are no document's; open the store with a "
            "budget (StoreConfig(foreign_cache=...), --foreign-cache)"
        )
    return kv.foreign, kv.passages


def _texts(given: Any) -> Iterator[Document]:
    """Yield each passage in `given`, whatever its container type. Raises ConfigError if `given` holds no passages."""
    if isinstance(given, str):
        yield Document("", given)
    elif isinstance(given, Document):
        title = given.title or text_field(given.metadata, "title")
        yield replace(given, title=title)
    elif isinstance(given, Passage):
        yield from _texts(
            Document(given.id or "", given.text, given.metadata, source=text_field(given.metadata, "source"))
        )
    elif isinstance(given, Hit):
        yield from _texts(given.chunk)
    elif isinstance(given, Chunk):
        yield Document(given.id, given.text, given.metadata, given.title, given.document_id)
    elif (adapter := find_adapter(given)) is not None:
        yield from _texts(adapter.documents(given))
    elif isinstance(given, Iterable) and not isinstance(given, bytes):
        for one in given:
            yield from _texts(one)
    else:
        raise ConfigError(
            f"a {type(given).__name__} holds no passages that can be read; give texts, rc.Document objects, documents, "
            "or a retriever or vector store of LangChain or LlamaIndex, with ragcache's integration installed"
        )
