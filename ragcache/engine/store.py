"""A store without models: its contents, its size, and its maintenance."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from contextlib import closing
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

from ragcache.engine.info import Info, info
from ragcache.engine.options import StoreConfig, check_names, names
from ragcache.engine.rates import RateFigures
from ragcache.engine.store_config import StoreParts, open_store
from ragcache.engine.usage_log import UsageLog
from ragcache.errors import ConfigError, MissingBlockError, NoSuchDocumentError, PinError, StoreClosedError
from ragcache.store.collections import OTHERS, CollectionTable, View, may, no_collection
from ragcache.store.documents import DocumentStore
from ragcache.store.filters import Filter
from ragcache.store.records import Chunk, StoredDocument

if TYPE_CHECKING:  # these import FAISS, which most calls do not need
    from ragcache.engine.doctor import DoctorReport
    from ragcache.engine.keys import Key
    from ragcache.ingest.encoder import ModelEncoder
    from ragcache.retrieval.embedder_types import Vectors
    from ragcache.retrieval.retriever import Retriever


MOST_VIEWS = 256
"""How many views are kept, with their indexes and caches. Beyond that, the least recently used view is dropped."""


class Store:
    """The documents of a store and their KV, to read, delete and check. It does not answer questions, embed or compute
    KV: `RagCache` does.

    Create it with `Store.open`. Thread-safe; several processes may open the same store.
    """

    _whole: Self | None = None  # in a view: the store that it shows; the reference keeps a shared store open

    def __init__(self, store: StoreParts, config: StoreConfig) -> None:
        self.store = store
        self.config = config
        self._usage = UsageLog(store.layout.root / "usage.json")
        self._closing = threading.Event()
        self._collections = CollectionTable(store.documents.database)
        self._views, self._seeing = OrderedDict[tuple[View, str, str], Self](), threading.Lock()

    @classmethod
    def open(cls, path: str | Path, *, store: StoreConfig | None = None, create: bool = False) -> Self:
        """Open the store at `path`, without models.

        store:  settings
        create: create the store if it does not exist

        Raises StoreNotFoundError, StoreReadOnlyError, SchemaVersionError, SealError, DatabaseMismatchError,
        StoreMismatchError (remote), ConfigError.
        """
        config = store or StoreConfig()
        return cls(open_store(path, config, create=create), config)

    # Collections

    def collections(self) -> list[str]:
        """Return the names of the collections that this view reads, OpenAI's vector stores included."""
        self._check_open()
        view = self.store.documents.view
        return [name for name in self._collections.secrets() if may(view.reads, name)]

    def collection(self, name: str, *, create: bool = True, public: bool = False) -> Self:
        """Return this store reduced to the collection `name`.

        Documents outside the collection are neither found nor listed, changed or deleted through the result. Close this
        store, and not the result.

        create: create the collection if it does not exist
        public: if the collection is created: share KV with other public collections. Otherwise the KV of its documents
                and questions is reused only for callers that may read the collection

        Raises NoSuchCollectionError, ConfigError (name), StoreReadOnlyError.
        """
        self._check_open()
        view = self.store.documents.view.only(name)
        if create and view.writes:
            self._collections.create(name, public=public)
        return self.seen_by(view)

    def delete_collection(self, name: str, *, timeout_s: float = 30.0) -> list[str]:
        """Delete a collection with its documents; return their ids. Raises NoSuchCollectionError, StoreBusyError."""
        seen = self.collection(name, create=False)
        deleted = seen.delete([document.id for document in seen.documents()], timeout_s=timeout_s)
        self.store.kv.unlearn(dropped=[name])
        self._collections.drop(name)
        return deleted

    def as_key(self, key: Key) -> Self:
        """Return this store as an API key sees it.

        Collections that the key may write to are created. Collections that it may read but that do not exist are left
        out.
        """
        view, known = key.view, self._collections
        changed = view.writes or frozenset()
        for name in sorted(changed - {OTHERS}) if not self.config.read_only else ():
            known.create(name)
        if view.reads is not None and view.reads != {OTHERS}:
            there = known.secrets(view.reads)
            view = replace(view, reads=frozenset(name for name in view.reads if name in there or name == OTHERS))
        return self.seen_by(view)

    def seen_by(self, view: View) -> Self:
        """Return this store as a view shows it. Everything else is shared, so close this store and not the result.

        KV of prompts, and of passages that callers give, is found only through views of the same collections. Other
        views cannot infer it from response times or counts either. Raises NoSuchCollectionError.
        """
        self._check_open()
        table = self._collections
        secret = "" if view.into is None else table.secret(view.into)
        if secret is None:
            raise no_collection(str(view.into))
        key = (view, table.salt(view), secret)
        with self._seeing:
            if key not in self._views:
                self._views[key] = self._seen(*key)
                self._views[key]._whole = self._whole or self
            self._views.move_to_end(key)
            while len(self._views) > MOST_VIEWS:
                self._views.popitem(last=False)
            return self._views[key]

    def _seen(self, view: View, salt: str, secret: str) -> Self:
        """Return this store as a view shows it.

        salt: salt of the KV of the view's prompts and given passages
        secret: salt of the KV of documents that are added through the view
        """
        made = copy(self)
        made.store = self.store._replace(documents=self.store.documents.seen_by(view))
        return made

    # Documents

    def documents(
        self, filter: Filter | None = None, *, limit: int | None = None, offset: int = 0
    ) -> list[StoredDocument]:
        """Return the documents that pass the filter, by id.

        Raises FilterError, also if nothing passes because no document has a field that the filter names.
        """
        documents = self.store.documents
        found = documents.documents(filter, limit=limit, offset=offset)
        if filter and not found and not documents.count(filter):
            documents.refuse_unknown_fields(filter, "document")
        return found

    def document(self, id: str) -> StoredDocument | None:
        return self.store.documents.document(id)

    def chunks(self, ids: Iterable[str] | None = None, *, filter: Filter | None = None) -> list[Chunk]:
        """Return the chunks that pass the filter: those with these ids, in their order, or those of all documents.

        Unknown ids are left out. Raises FilterError as `documents` does.
        """
        documents = self.store.documents
        found = documents.chunks(ids, filter)
        if filter and not found:
            documents.refuse_unknown_fields(filter)
        return found

    def chunks_of(self, document_id: str) -> list[Chunk]:
        """Return a document's chunks in order, or [] for an unknown document."""
        return self.store.documents.chunks_of(document_id)

    def delete(
        self, ids: Iterable[str] | str = (), *, filter: Filter | None = None, timeout_s: float = 30.0
    ) -> list[str]:
        """Delete documents by id, and those that pass the filter; return the ids found.

        This removes their text, embeddings, index entries, and KV bytes in every tier. Raises FilterError,
        StoreBusyError, StoreReadOnlyError, NotAllowedError.
        """
        from ragcache.retrieval.deletion import delete_documents

        self._check_open()
        self.store.documents.check_changes()
        document_ids = [ids] if isinstance(ids, str) else list(ids)
        if filter:
            document_ids += [document.id for document in self.documents(filter)]
        deleted = delete_documents(*self.store, self._open_index(), document_ids, timeout_s=timeout_s)
        self._forget_deleted()
        return deleted

    def _open_index(self) -> Retriever | None:
        """Return the object that keeps the vector index up to date, or None if nothing was embedded yet."""
        from ragcache.retrieval.retriever import Retriever

        absent = AbsentEmbedder.of(self.store.documents)
        if absent is None:
            return None
        store = self.store
        return Retriever.open(store.documents, store.layout.index, absent, kind=self.config.index, seal=store.kv.seal)

    def _forget_deleted(self) -> None:
        """Drop blocks that another process deleted: they may still be in this process's memory (law 10)."""
        self.store.kv.refresh()

    def pin(self, ids: Iterable[str] | str) -> list[str]:
        """Protect the KV of these documents or chunks from eviction and expiry until `unpin` or `delete`; return the
        handles.

        `RagCache.pin` computes missing KV first. Raises NoSuchDocumentError, PinError (a tier would have no room left),
        MissingBlockError (there is no KV yet, or no tier has room for it), StoreReadOnlyError.
        """
        chunks, encoder, kv = self._chunks_of_all(ids), self._encoder, self.store.kv
        pending = next((chunk.id for chunk in chunks if chunk.handle is None), None)
        if encoder is None and pending is not None:
            raise MissingBlockError(
                f"chunk {pending!r} has no KV yet; open the store with its models to compute and pin it"
            )
        keys = [str(chunk.handle) for chunk in chunks] if encoder is None else encoder.keys(chunks)
        missing = [chunk for chunk, key in zip(chunks, keys, strict=True) if key not in kv]
        if missing and encoder is not None:
            from ragcache.engine.loader import BlockLoader
            from ragcache.engine.rates import ALWAYS

            with closing(BlockLoader(kv, policy=ALWAYS)) as loader:
                loader.load(encoder, self.store.documents, missing)
            if absent := [key for key in keys if key not in kv]:
                raise PinError(
                    f"the tiers have no room for {len(keys)} blocks at once ({len(absent)} are gone already)"
                )
        kv.pin(keys)
        return list(dict.fromkeys(keys))

    def unpin(self, ids: Iterable[str] | str) -> list[str]:
        """Undo `pin`; return the handles that were pinned. Raises NoSuchDocumentError, StoreReadOnlyError."""
        chunks, encoder = self._chunks_of_all(ids), self._encoder
        named = {chunk.handle for chunk in chunks if chunk.handle is not None}
        pinned = sorted((named if encoder is None else named.union(encoder.keys(chunks))) & self.store.kv.pinned)
        self.store.kv.unpin(pinned)
        return pinned

    @property
    def _encoder(self) -> ModelEncoder | None:
        """Return the encoder that computes blocks, or None if no model runs in this process."""
        return None

    def _chunks_of_all(self, ids: Iterable[str] | str) -> list[Chunk]:
        """Return all chunks of these documents, and these chunks. Raises NoSuchDocumentError for an unknown id."""
        found: list[Chunk] = []
        for id in dict.fromkeys([ids] if isinstance(ids, str) else ids):
            chunks = self.chunks_of(id) or self.chunks([id])
            if not chunks and self.document(id) is None:
                raise NoSuchDocumentError(
                    f"{id!r}: neither a document nor a chunk has this id; `ragcache list` shows them"
                )
            found += chunks
        return found

    # Maintenance

    def rates(self) -> RateFigures:
        """Return how fast blocks are read and computed, as last measured with models."""
        return RateFigures.read(self.store.rates) or RateFigures()

    def info(self) -> Info:
        return info(self.store, self._usage)

    def doctor(self, *, timeout_s: float = 30.0, recompute: int = 0) -> DoctorReport:
        """Verify every block and the index, and repair them; see `ragcache.engine.doctor.doctor`.

        recompute: how many blocks, chosen at random, the model computes anew to compare them (`RagCache.open`)
        """
        from ragcache.engine.doctor import doctor

        return doctor(
            self.store, index_kind=self.config.index, timeout_s=timeout_s, recompute=recompute, encoder=self._encoder
        )

    def close(self) -> None:
        """Write counts and measurements to disk, and release everything. May be called twice; other calls then raise
        StoreClosedError.

        In a fork of the process nothing is done: everything belongs to the parent.
        """
        if self._closed or not self.store.layout.home.is_here:
            return
        self._closing.set()
        self._let_go()

    @property
    def _closed(self) -> bool:
        return self._closing.is_set()

    def _let_go(self) -> None:
        if not self.config.read_only and self.store.layout.exists():
            self._usage.record(self.store.kv.stats())
        self.store.close()

    def _check(self, fields: Iterable[str], options: type) -> None:
        """Raise StoreClosedError, ForkedError, or ConfigError for unknown options."""
        self._check_open()
        check_names(fields, names(options))

    def _check_open(self) -> None:
        self.store.layout.home.check()
        if self._closed:
            raise StoreClosedError(f"{self.store.layout.root}: this store is closed; open it again")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


@dataclass(frozen=True)
class AbsentEmbedder:
    """Replaces the embedder of a store opened without models: the index can be changed, nothing is embedded."""

    name: str
    dimension: int

    @classmethod
    def of(cls, documents: DocumentStore) -> Self | None:
        """Return the replacement, or None for a store without embeddings."""
        bound = documents.properties()
        if "embedder" not in bound or "embedding_dim" not in bound:
            return None
        return cls(str(bound["embedder"]), int(str(bound["embedding_dim"])))

    def embed(self, texts: Sequence[str], *, batch_size: int = 32) -> Vectors:
        raise ConfigError("a Store has no embedder; open the store with RagCache.open")

    def embed_query(self, text: str) -> Vectors:
        raise ConfigError("a Store has no embedder; open the store with RagCache.open")
