"""The parts of a store that an ingestion writes to, and the deletions that keep them consistent."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ragcache.errors import Config
from ragcache.ingest.chunker import Chunker
from ragcache.ingest.encoder import BlockKeys
from ragcache.ingest.read_limits import ReadLimits
from ragcache.retrieval.deletion import delete_documents
from ragcache.retrieval.retriever import Retriever
from ragcache.store.directory import StoreLayout
from ragcache.store.documents import DocumentStore
from ragcache.store.kv_store import KVStore, collect_garbage


@dataclass(frozen=True)
class IngestConfig(Config):
    """Settings of an ingestion.

    window_tokens: documents are committed whenever their chunks add up to this many tokens
    batch_tokens:  padded tokens that the language model reads at once; None: a number that suits its device
    save_every_s:  seconds between two saves of the index, which is saved at the end in any case
    reading:       limits on the reading of a document
    """

    window_tokens: int = 8192
    batch_tokens: int | None = None
    save_every_s: float = 60.0
    reading: ReadLimits = field(default_factory=ReadLimits)


@dataclass
class StoreWriter:
    """The parts of a store that ingestion changes."""

    layout: StoreLayout
    documents: DocumentStore
    kv: KVStore
    retriever: Retriever
    chunker: Chunker
    block_keys: BlockKeys
    config: IngestConfig = field(default_factory=IngestConfig)

    def delete(self, ids: Iterable[str], *, timeout_s: float = 30.0) -> list[str]:
        """Delete documents and return the ids that were found; see `delete_documents`."""
        store = (self.layout, self.documents, self.kv, self.retriever)
        return delete_documents(*store, ids, timeout_s=timeout_s)

    def collect_garbage(self) -> int:
        """Delete the blocks that no chunk refers to, and return their number. The caller holds the writer lock."""
        return collect_garbage(self.documents, self.kv)
