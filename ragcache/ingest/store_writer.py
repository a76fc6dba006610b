"""The parts of a store that an ingestion writes to, and the deletions that keep them together."""

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
    """window_tokens: documents are committed when this many tokens of chunks have come together
    batch_tokens:  padded tokens that the language model reads at once; what suits its device when None
    save_every_s:  seconds between two savings of the index; it is saved at the end in any case
    reading:       what reading one document may take
    """

    window_tokens: int = 8192
    batch_tokens: int | None = None
    save_every_s: float = 60.0
    reading: ReadLimits = field(default_factory=ReadLimits)


@dataclass
class StoreWriter:
    """One store, as ingestion changes it."""

    layout: StoreLayout
    documents: DocumentStore
    kv: KVStore
    retriever: Retriever
    chunker: Chunker
    block_keys: BlockKeys
    config: IngestConfig = field(default_factory=IngestConfig)

    def delete(self, ids: Iterable[str], *, timeout_s: float = 30.0) -> list[str]:
        """Delete documents; see `delete_documents`."""
        store = (self.layout, self.documents, self.kv, self.retriever)
        return delete_documents(*store, ids, timeout_s=timeout_s)

    def collect_garbage(self) -> int:
        """Delete the blocks that no chunk refers to any more; returns how many. The caller holds the writer lock."""
        return collect_garbage(self.documents, self.kv)
