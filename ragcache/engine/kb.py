"""The engine: documents in, answers out."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from ragcache.engine.answer import Answer, Done, Event
from ragcache.engine.asking import Clock, Reader
from ragcache.engine.maintenance import DoctorReport, Info, doctor, info
from ragcache.engine.opening import Store, StoreConfig, absent_embedder, open_embedder, open_model, open_store
from ragcache.engine.usage import UsageLog
from ragcache.engine.verdict import AUTO, choose_safe, warn_if_unsafe
from ragcache.errors import ConfigError
from ragcache.fusion import get_method
from ragcache.fusion.base import FusionMethod
from ragcache.fusion.eviction import SnapKV
from ragcache.fusion.fuse import block_recipe
from ragcache.ingest.chunker import Chunker, ChunkerConfig
from ragcache.ingest.document import Document
from ragcache.ingest.encoder import ModelEncoder
from ragcache.ingest.pipeline import IngestConfig, Ingestor
from ragcache.ingest.report import IngestReport, Progress
from ragcache.kv.identity import Recipe
from ragcache.models.decoding import Sampling
from ragcache.models.lm import LanguageModel
from ragcache.prompt import prompt_format
from ragcache.retrieval.embedder import Embedder
from ragcache.retrieval.retriever import Hit, Retriever
from ragcache.store.filters import Filter
from ragcache.store.garbage import collect_garbage
from ragcache.store.records import Document as StoredDocument

DEFAULT_K = 5
T = TypeVar("T")


class RagCache:
    """A knowledge base: one store, one language model, one embedder.

    Use `RagCache.open`. Thread-safe: several threads may ask while one ingests; several processes may open one store,
    of which one ingests at a time.
    """

    def __init__(self, store: Store, config: StoreConfig) -> None:
        self.store = store
        self.config = config
        self._usage = UsageLog(store.layout.root / "usage.json")
        self._lm: LanguageModel | None = None
        self._method: FusionMethod | None = None
        self._evict: SnapKV | None = None
        self._retriever: Retriever | None = None
        self._ingestor: Ingestor | None = None
        self._reader: Reader | None = None
        self._generation = -1

    @classmethod
    def open(
        cls,
        path: str | Path,
        *,
        model: str | Path | LanguageModel | None = None,
        method: str | FusionMethod | None = None,
        evict: SnapKV | int | None = None,
        embedder: str | Path | Embedder | None = None,
        recipe: str | Recipe | None = None,
        dtype: str | None = None,
        device: str = "cpu",
        system: str | None = None,
        question_format: str | None = None,
        chunker: ChunkerConfig | None = None,
        ingest: IngestConfig | None = None,
        store: StoreConfig | None = None,
        tenant: str = "",
        create: bool = True,
        models: bool = True,
        **method_options: Any,
    ) -> Self:
        """Open the store at `path`, or make one.

        model:    bundled name, directory, hub id or a loaded LanguageModel; None: the store's own, "mini" if new
        method:   fusion method of `ask` and `stream`, with its options as further keyword arguments; None: the one that
                  the model was trained for; "auto": the cheapest that passed `ragcache check`
        evict:    of the passages' tokens, what each layer and KV head keeps once the first token of an answer is known:
                  a budget or a SnapKV; None: all of them
        embedder: "minilm", "contriever", directory, hub id or an Embedder; None: the store's own, "minilm" if new
        recipe:   how chunks are encoded; None: as the model was trained, else the method's first choice
        dtype, device: of the language model
        system, question_format: see `ragcache.prompt.prompt_format`
        chunker, ingest, store: settings of those parts
        tenant:   salt of block keys: blocks of one tenant are never hits for another
        create:   make a store where there is none
        models:   False loads neither language model nor embedder: documents can be listed and deleted, not asked

        Raises StoreNotFoundError, StoreMismatchError (model, embedder or schema version), StoreReadOnlyError,
        ModelError, EmbedderError, ConfigError.
        """
        config = store or StoreConfig()
        chosen = None if method is None or method == AUTO else get_method(method, **method_options)
        choice = None if evict is None else SnapKV.of(evict)
        opened = open_store(path, config, create=create)
        kb = cls(opened, config)
        kb._evict = choice
        try:
            if models:
                kb._load_models(model, embedder, dtype, device)
                if method == AUTO:
                    kb._method, recipe = kb._safe_method(recipe)
                else:
                    kb._method = kb._warned_of(chosen or get_method(kb.lm.default_method, **method_options))
                kb._prepare(recipe, system, question_format, chunker, ingest, tenant)
            elif (absent := absent_embedder(opened.documents)) is not None:
                kb._retriever = Retriever.open(opened.documents, opened.layout.index, absent, kind=config.index)
        except BaseException:
            opened.close()
            raise
        return kb

    def _load_models(
        self,
        model: str | Path | LanguageModel | None,
        embedder: str | Path | Embedder | None,
        dtype: str | None,
        device: str,
    ) -> None:
        documents = self.store.documents
        self._lm = open_model(documents, model, dtype, device)
        found = open_embedder(documents, embedder, device)
        self._retriever = Retriever.open(documents, self.store.layout.index, found, kind=self.config.index)

    def _prepare(
        self,
        recipe: str | Recipe | None,
        system: str | None,
        question_format: str | None,
        chunker: ChunkerConfig | None,
        ingest: IngestConfig | None,
        tenant: str,
    ) -> None:
        lm, store = self.lm, self.store
        text = prompt_format(lm.tokenizer, system=system, question_format=question_format)
        method = _present(self._method)
        prefix_ids = text.prefix_ids
        if method.reuses_blocks:
            prefix_ids += method.additions(lm).behind_prefix
        encoder = ModelEncoder(lm, block_recipe(lm, method, recipe), prefix_ids, tenant)
        self._reader = Reader(lm, encoder, text, store.kv, store.documents)
        cut = Chunker(lm.tokenizer, **asdict(chunker)) if chunker else Chunker(lm.tokenizer)
        self._ingestor = Ingestor(store.layout, store.documents, store.kv, self.retriever, cut, encoder, ingest)

    # Parts

    @property
    def lm(self) -> LanguageModel:
        """Raises ConfigError when the store was opened without models."""
        return _present(self._lm)

    @property
    def retriever(self) -> Retriever:
        return _present(self._retriever)

    # Documents

    def ingest(
        self,
        inputs: Iterable[str | os.PathLike[str] | Document] | str | os.PathLike[str] | Document,
        *,
        kv: str = "eager",
        progress: Progress | bool | None = None,
        timeout_s: float = 30.0,
    ) -> IngestReport:
        """Store files, folders and Document objects; see `Ingestor.ingest`.

        progress: a callback of ProgressEvents, or True for bars on the terminal
        """
        given = [inputs] if isinstance(inputs, str | os.PathLike | Document) else inputs
        ingestor = _present(self._ingestor)
        if progress is not True:
            return ingestor.ingest(given, kv=kv, progress=progress or None, timeout_s=timeout_s)
        from ragcache.ingest.progress_bars import progress_bars

        with progress_bars() as bars:
            return ingestor.ingest(given, kv=kv, progress=bars, timeout_s=timeout_s)

    def delete(self, ids: Iterable[str] | str, *, timeout_s: float = 30.0) -> list[str]:
        """Delete documents: text, embeddings, index entries, KV bytes in every tier. Returns the ids found."""
        wanted = [ids] if isinstance(ids, str) else list(ids)
        if self._ingestor is not None:
            return self._ingestor.delete(wanted, timeout_s=timeout_s)
        return self._delete_without_models(wanted, timeout_s)

    def _delete_without_models(self, ids: Sequence[str], timeout_s: float) -> list[str]:
        store = self.store
        with store.layout.writer(timeout_s):
            deleted = store.documents.delete_documents(ids)
            collect_garbage(store.documents, store.kv)
            if deleted and self._retriever is not None:
                self._retriever.refresh()
                self._retriever.index.compact()
                self._retriever.save(store.layout.index)
        return deleted

    def documents(
        self, filter: Filter | None = None, *, limit: int | None = None, offset: int = 0
    ) -> list[StoredDocument]:
        """Documents whose metadata pass the filter, by id."""
        return self.store.documents.documents(filter, limit=limit, offset=offset)

    # Questions

    def retrieve(
        self,
        question: str,
        k: int = DEFAULT_K,
        *,
        filter: Filter | None = None,
        score_threshold: float | None = None,
        mmr_lambda: float | None = None,
    ) -> list[Hit]:
        """The k chunks nearest to the question, best first; see `Retriever.retrieve`."""
        self._drop_deleted()
        return self.retriever.retrieve(
            question, k, filter=filter, score_threshold=score_threshold, mmr_lambda=mmr_lambda
        )

    def ask(self, question: str, k: int = DEFAULT_K, **options: Any) -> Answer:
        """Answer a question from the store. Options as for `stream`; the same events, collected."""
        for event in self.stream(question, k, **options):
            if isinstance(event, Done):
                return event.answer
        raise ConfigError("the stream ended without an answer")  # a Reader that breaks its contract

    def stream(
        self,
        question: str,
        k: int = DEFAULT_K,
        *,
        hits: Sequence[Hit] | None = None,
        method: str | FusionMethod | None = None,
        method_options: Mapping[str, Any] | None = None,
        evict: SnapKV | int | None = None,
        sampling: Sampling | None = None,
        filter: Filter | None = None,
        score_threshold: float | None = None,
        mmr_lambda: float | None = None,
        on_overflow: str = "error",
        cancelled: threading.Event | None = None,
    ) -> Iterator[Event]:
        """Sources, then tokens, then the whole answer.

        hits:        passages to read instead of retrieving, best first
        method:      another fusion method than the one the store was opened with
        method_options: options of `method`, or of the store's own method
        evict:       as for `open`; None: what the store was opened with
        on_overflow: when the passages do not fit the model's context: "error", or "trim" whole passages from the end
                     (`Answer.dropped` says how many)
        cancelled:   set it to stop

        Raises PromptError, ContextTooLongError, ConfigError, FilterError, CancelledError.
        """
        reader = _present(self._reader)
        chosen = self._chosen(method, method_options or {})
        reader.check(chosen)
        choice = self._evict if evict is None else SnapKV.of(evict)
        return self._stream(
            reader, question, k, hits, chosen, choice, sampling or Sampling(), filter, score_threshold, mmr_lambda,
            on_overflow, cancelled,
        )  # fmt: skip

    def _chosen(self, method: str | FusionMethod | None, options: Mapping[str, Any]) -> FusionMethod:
        own = _present(self._method)
        if method is None:
            return get_method(own.name, **options) if options else own
        if method == AUTO:
            return self._safe_method(_present(self._reader).encoder.recipe)[0]
        return self._warned_of(get_method(method, **options))

    def _safe_method(self, recipe: str | Recipe | None) -> tuple[FusionMethod, str | Recipe | None]:
        """What `ragcache check` found to be the cheapest safe method, and the recipe it goes with."""
        name = None if recipe is None else Recipe.of(recipe).name
        method, checked = choose_safe(self.store.layout.root, self.lm.fingerprint, name)
        return method, recipe if recipe is not None else checked

    def _warned_of(self, method: FusionMethod) -> FusionMethod:
        """The same method, after a warning where it failed the check of this model."""
        warn_if_unsafe(self.store.layout.root, self.lm.fingerprint, method)
        return method

    def _stream(
        self,
        reader: Reader,
        question: str,
        k: int,
        hits: Sequence[Hit] | None,
        method: FusionMethod,
        evict: SnapKV | None,
        sampling: Sampling,
        filter: Filter | None,
        score_threshold: float | None,
        mmr_lambda: float | None,
        on_overflow: str,
        cancelled: threading.Event | None,
    ) -> Iterator[Event]:
        clock = Clock(time.perf_counter())
        reader.prompt(question, [], method, on_overflow)  # a question that cannot be asked is not worth a search
        if hits is None:
            hits = self.retrieve(question, k, filter=filter, score_threshold=score_threshold, mmr_lambda=mmr_lambda)
        clock.retrieve_s = time.perf_counter() - clock.started
        yield from reader.stream(question, hits, method, evict, sampling, on_overflow, clock, cancelled)

    def _drop_deleted(self) -> None:
        """What another process deleted may be in this one's memory still (law 10)."""
        generation = self.store.documents.generation()
        if generation != self._generation:
            self.store.kv.refresh()
            self._generation = generation

    # Care

    def info(self) -> Info:
        return info(self.store, self._usage)

    def doctor(self, *, timeout_s: float = 30.0) -> DoctorReport:
        """Verify every block and the index, and repair; see `ragcache.engine.maintenance.doctor`."""
        return doctor(self.store, index_kind=self.config.index, timeout_s=timeout_s)

    def close(self) -> None:
        """Write down the hit counts and let go of everything."""
        if not self.config.read_only:
            self._usage.record(self.store.kv.stats())
        self.store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _present(part: T | None) -> T:
    if part is None:
        raise ConfigError("the store was opened without its models (models=False); open it with them to ask or ingest")
    return part
