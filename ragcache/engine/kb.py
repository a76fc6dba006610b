"""The engine: documents in, answers out."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack, get_args

import numpy as np
from numpy.typing import NDArray

from ragcache.codecs import get_codec
from ragcache.engine.aio import AsyncTwins
from ragcache.engine.answer import Answer, Done, Event
from ragcache.engine.asking.admission import Admission, default_budget
from ragcache.engine.asking.conversation import Conversation, completion_ends
from ragcache.engine.asking.estimate import PrefillEstimate
from ragcache.engine.asking.kept import KeptConversation, TurnMemory, inline_passages
from ragcache.engine.asking.mini_notice import MiniNotice
from ragcache.engine.asking.passage import Passage, find_passages
from ragcache.engine.asking.plain_text import PlainTextWatch
from ragcache.engine.asking.prefixes import Prefixes
from ragcache.engine.asking.reader import Clock, Kept, Reader, Reading
from ragcache.engine.asking.verdict import AUTO, choose_safe, warn_if_unsafe
from ragcache.engine.care.kv_estimate import KVEstimate, estimate_kv
from ragcache.engine.care.maintenance import DoctorReport, Info, doctor, info
from ragcache.engine.care.pinning import pin, unpin
from ragcache.engine.care.usage import UsageLog
from ragcache.engine.loading.loader import ALWAYS, Ahead, BlockLoader, LoadCounts
from ragcache.engine.loading.probe import open_rates
from ragcache.engine.loading.rates import RateFigures, Rates
from ragcache.engine.loading.rates_file import RatesFile, machine_key
from ragcache.engine.opening import Store, StoreConfig, absent_embedder, open_embedder, open_model, open_store
from ragcache.engine.options import (
    DEFAULT_K,
    AskOptions,
    ChatOptions,
    Context,
    ReadOptions,
    RetrieveOptions,
    check_names,
    retrieval,
)
from ragcache.errors import ConfigError
from ragcache.fusion import get_method
from ragcache.fusion.base import FusionMethod
from ragcache.fusion.eviction import SnapKV
from ragcache.fusion.fuse import block_recipe
from ragcache.ingest.chunker import Chunker, ChunkerConfig
from ragcache.ingest.document import Document
from ragcache.ingest.encoder import ModelEncoder
from ragcache.ingest.pipeline import IngestConfig, Ingestor
from ragcache.ingest.readers import SourceFile
from ragcache.ingest.report import IngestReport, Progress
from ragcache.ingest.run import Input
from ragcache.ingest.whole import WholeTexts
from ragcache.kv.identity import Recipe
from ragcache.kv.prefix_tree import PrefixStats, PrefixTree
from ragcache.models.decoding import Sampling
from ragcache.models.lm import LanguageModel
from ragcache.openmp import end_team, team_ends
from ragcache.prompt import PromptEnds, encode_text, prompt_format
from ragcache.retrieval.embedder import Embedder
from ragcache.retrieval.retriever import Hit, Retriever
from ragcache.store.filters import Filter
from ragcache.store.garbage import collect_garbage
from ragcache.store.records import Chunk, StoredDocument

T = TypeVar("T")
Inputs = Iterable[Input] | Input


class RagCache(AsyncTwins):
    """A knowledge base: one store, one language model, one embedder.

    Use `RagCache.open`. Thread-safe: several threads may ask while one ingests; several processes may open one store,
    of which one ingests at a time.
    """

    def __init__(self, store: Store, config: StoreConfig) -> None:
        super().__init__()
        self.store = store
        self.config = config
        self._usage = UsageLog(store.layout.root / "usage.json")
        self._kept_rates = RatesFile(store.layout.root / "rates.json")
        self._rates: Rates | None = None
        self._loader: BlockLoader | None = None
        self._lm: LanguageModel | None = None
        self._method: FusionMethod | None = None
        self._evict: SnapKV | None = None
        self._retriever: Retriever | None = None
        self._ingestor: Ingestor | None = None
        self._reader: Reader | None = None
        self._admission: Admission | None = None
        self._whole: WholeTexts | None = None
        self._turns: TurnMemory | None = None
        self._system: str | None = None
        self._plain_text = PlainTextWatch()
        self._mini_notice: MiniNotice | None = None
        self._generation = -1
        self._prefills = PrefillEstimate()

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
        self.store.kv.use_device(self._lm.device)
        found = open_embedder(documents, embedder, device)
        self._retriever = Retriever.open(documents, self.store.layout.index, found, kind=self.config.index)

    @team_ends()
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
        tree = PrefixTree(lm.shape, self.config.prefix_bytes)
        used, learn = block_recipe(lm, method, recipe), self._prefills.add
        prefixes = Prefixes(lm, store.documents, used, tenant, tree, prefix_ids)
        encoder = ModelEncoder(lm, used, prefix_ids, tenant, read_prefix=prefixes.exact, on_encoded=learn)
        self._turns = TurnMemory(store.documents, tenant)
        answer_bytes = self.config.answer_bytes
        self._admission = Admission(default_budget(lm) if answer_bytes is None else answer_bytes)
        self._open_loader()
        self._reader = Reader(
            lm,
            encoder,
            text,
            store.kv,
            store.documents,
            prefixes,
            self._admission,
            self._prefills,
            self._loader,
        )
        self._whole = WholeTexts(lm.tokenizer, lm.max_positions)
        self._mini_notice = MiniNotice(lm.name)
        self._system = system
        cut = Chunker(lm.tokenizer, **asdict(chunker)) if chunker else Chunker(lm.tokenizer)
        self._ingestor = Ingestor(store.layout, store.documents, store.kv, self.retriever, cut, encoder, ingest)

    def _open_loader(self) -> None:
        config, kv = self.config, self.store.kv
        if config.load == ALWAYS:
            return
        self._rates = open_rates(self._kept_rates, kv.root, self.lm, get_codec(config.codec), config.measure_s)
        self._loader = BlockLoader(kv, self._rates, policy=config.load, ahead_bytes=config.speculative_bytes)

    # Parts

    @property
    def lm(self) -> LanguageModel:
        """Raises ConfigError when the store was opened without models."""
        return _present(self._lm)

    @property
    def retriever(self) -> Retriever:
        return _present(self._retriever)

    @property
    def embedder(self) -> Embedder:
        return self.retriever.embedder

    @property
    def method(self) -> str:
        """Name of the fusion method that questions are read with, unless they name another."""
        return _present(self._method).name

    @property
    def admission(self) -> Admission:
        """The memory of answers in progress. Raises ConfigError when the store was opened without models."""
        return _present(self._admission)

    def count_tokens(self, text: str) -> int:
        """Of the language model, no special ones added."""
        return len(encode_text(self.lm.tokenizer, text))

    def full_prefill_estimate_s(self, num_tokens: int) -> float | None:
        """Seconds that a full prefill of so many tokens would take here, by the fastest of what this process has read
        in full: prompts under `full`, passages that were encoded. None where it has read nothing yet."""
        return self._prefills.seconds(num_tokens)

    @property
    def full_prefill_samples(self) -> int:
        """How many reads `full_prefill_estimate_s` was learnt from."""
        return self._prefills.samples

    # Documents

    @team_ends()
    def ingest(
        self,
        inputs: Inputs,
        *,
        kv: str | None = None,
        hot_after: int | None = None,
        split: bool = True,
        sync: bool = False,
        dry_run: bool = False,
        progress: Progress | bool | None = None,
        timeout_s: float = 30.0,
        cancelled: threading.Event | None = None,
    ) -> IngestReport:
        """Store files, folders and Document objects; see `Ingestor.ingest`.

        kv, hot_after: None: as the store was opened (StoreConfig)
        split:    False makes every document one passage, kept as it is, whose chunk's id is the document's
        sync:     delete documents whose files have vanished from the given files and folders, and follow renames
        dry_run:  change nothing; the report says what would be
        progress: a callback of ProgressEvents, or True for bars on the terminal, with what the KV takes on disk: about,
                  before, and exactly, afterwards
        cancelled: set it to stop
        """
        given = _listed(inputs)
        ingestor = _present(self._ingestor)
        chunker = None if split else self._whole
        run = partial(
            ingestor.ingest,
            given,
            kv=self.config.kv if kv is None else kv,
            hot_after=self.config.hot_after if hot_after is None else hot_after,
            chunker=chunker,
            sync=sync,
            dry_run=dry_run,
            timeout_s=timeout_s,
            cancelled=cancelled,
        )
        if progress is not True:
            return run(progress=progress or None)
        from ragcache.ingest.progress_bars import progress_bars, say_line

        say_line(str(self.estimate_kv(given)))
        with progress_bars() as bars:
            report = run(progress=bars)
        if not dry_run:
            say_line(report.kv_text)
        return report

    def estimate_kv(self, inputs: Inputs) -> KVEstimate:
        """What the KV of files, folders and Document objects will take on disk, from a sample of their text."""
        chunker = _present(self._ingestor).chunker
        return estimate_kv(_listed(inputs), self.lm, self.config.codec, chunker.settings["max_tokens"])

    def delete(
        self, ids: Iterable[str] | str = (), *, filter: Filter | None = None, timeout_s: float = 30.0
    ) -> list[str]:
        """Delete documents by id, and those that pass the filter: text, embeddings, index entries, KV bytes in every
        tier. Returns the ids found. Raises FilterError, StoreBusyError, StoreReadOnlyError."""
        wanted = [ids] if isinstance(ids, str) else list(ids)
        if filter:
            wanted += [document.id for document in self.documents(filter)]
        if self._ingestor is not None:
            deleted = self._ingestor.delete(wanted, timeout_s=timeout_s)
        else:
            deleted = self._delete_without_models(wanted, timeout_s)
        self._drop_deleted()
        return deleted

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
        """Documents that pass the filter, by id."""
        return self.store.documents.documents(filter, limit=limit, offset=offset)

    def document(self, id: str) -> StoredDocument | None:
        return self.store.documents.document(id)

    def chunks(self, ids: Iterable[str]) -> list[Chunk]:
        """The chunks of these chunk ids, in their order; an id that is not there is left out."""
        return self._handed_out(self.store.documents.chunks(ids))

    def chunks_of(self, document_id: str) -> list[Chunk]:
        """A document's chunks in order; none for an unknown document."""
        return self._handed_out(self.store.documents.chunks_of(document_id))

    def _handed_out(self, chunks: list[Chunk]) -> list[Chunk]:
        self._plain_text.handed_out(chunks)
        return chunks

    def vectors(self, ids: Iterable[str]) -> NDArray[np.float32]:
        """The embeddings of `chunks(ids)`: float32 [n, dimension]."""
        return self.store.documents.vectors(ids, self.embedder.dimension)

    @team_ends()
    def pin(self, ids: Iterable[str] | str) -> list[str]:
        """Let no tier give up the KV of these documents or chunks, nor time drop it, until `unpin` or `delete`; what is
        not there is computed. Returns the handles.

        Raises NoSuchDocumentError, PinError (a tier would have no room left), MissingBlockError (nothing to compute it
        with, or no room), StoreReadOnlyError.
        """
        return pin(self.store.documents, self.store.kv, self._encoder(), [ids] if isinstance(ids, str) else ids)

    def unpin(self, ids: Iterable[str] | str) -> list[str]:
        """End `pin`; returns the handles that were pinned. Raises NoSuchDocumentError, StoreReadOnlyError."""
        return unpin(self.store.documents, self.store.kv, self._encoder(), [ids] if isinstance(ids, str) else ids)

    def _encoder(self) -> ModelEncoder | None:
        return None if self._reader is None else self._reader.encoder

    # Questions

    def retrieve(
        self, question: str | NDArray[np.float32], k: int = DEFAULT_K, **options: Unpack[RetrieveOptions]
    ) -> list[Hit]:
        """The k chunks nearest to the question (text, or its vector), best first; see `Retriever.retrieve`."""
        check_names(options, RetrieveOptions)
        return self._retrieve(question, k, options)

    def _retrieve(
        self, question: str | NDArray[np.float32], k: int, options: Mapping[str, Any], ahead: Ahead | None = None
    ) -> list[Hit]:
        """ahead: begins to read what is likely to be among the hits."""
        self._drop_deleted()
        foresee = None if ahead is None else ahead.begin
        find: Callable[..., list[Hit]] = self.retriever.retrieve_by_vector
        if isinstance(question, str):
            find = self.retriever.retrieve
        hits = find(question, k, **options, foresee=foresee)
        self._plain_text.handed_out(hit.chunk for hit in hits)
        return hits

    def ask(self, question: str, k: int = DEFAULT_K, **options: Unpack[AskOptions]) -> Answer:
        """Answer a question from the store. Options as for `stream`; the same events, collected."""
        return _answer(self.stream(question, k, **options))

    def stream(self, question: str, k: int = DEFAULT_K, **options: Unpack[AskOptions]) -> Iterator[Event]:
        """Sources, then tokens, then the whole answer.

        options: `AskOptions`: which passages to find (`RetrieveOptions`) or `hits` to read instead, and how to read
                 and answer (`ReadOptions`)

        Answers that are made at the same time share the model's passes and the memory of `StoreConfig.answer_bytes`;
        one that does not fit waits for others to end, so close a stream that is not read to its end.

        Raises PromptError, ContextTooLongError, AnswerTooLargeError, ConfigError, FilterError, UnknownHandleError,
        CancelledError, TimedOutError.
        """
        check_names(options, AskOptions)
        chosen = self._reading(options)
        self._look([question], chosen)

        def find() -> Sequence[Hit | Passage]:
            if (hits := options.get("hits")) is not None:
                self._drop_deleted()
                return hits
            return self._retrieve(question, k, retrieval(options), chosen.ahead)

        return self._stream(lambda reader: reader.question_ends(question), find, chosen)

    def chat(self, messages: Sequence[Mapping[str, Any]], **options: Unpack[ChatOptions]) -> Answer:
        """Answer a conversation. Options as for `stream_chat`; the same events, collected."""
        return _answer(self.stream_chat(messages, **options))

    def stream_chat(self, messages: Sequence[Mapping[str, Any]], **options: Unpack[ChatOptions]) -> Iterator[Event]:
        """Go on with a conversation: sources, then tokens, then the whole answer.

        messages: {"role": "system" | "user" | "assistant", "content": text, or a list of texts and passages}. Passages
                  (of the last message that has any) are read where they stand; only white space may be between them
        options:  `ChatOptions`: `passages`, or `k` and which to find, `context`, and how to read and answer

        Without passages and k the model answers from the conversation alone. Raises what `stream` raises.
        """
        check_names(options, ChatOptions)
        passages, k, context = options.get("passages"), options.get("k"), options.get("context", "last")
        conversation = Conversation(messages)
        given = sum((conversation.has_passages, passages is not None, k is not None))
        if given > 1:
            raise ConfigError("passages in messages, passages= and k= exclude each other; choose one")
        if context not in get_args(Context):
            raise ConfigError(f"context {context!r} is unknown; choose one of {', '.join(get_args(Context))}")
        chosen = self._reading(options)
        self._look(conversation.given_text, chosen)
        tokenizer = self.lm.tokenizer
        if context == "keep":
            if passages is not None:
                raise ConfigError('context="keep" takes passages in the messages, where each turn has its own, or k=')
            return self._stream_kept(conversation, k, retrieval(options), chosen)
        if passages is None and k is None:
            written, inline = conversation.as_written(tokenizer, self._system)
            self._drop_deleted()
            return self._stream(lambda reader: written, lambda: inline, chosen)

        def find() -> Sequence[Hit | Passage]:
            if passages is not None:
                self._drop_deleted()
                return passages
            count = DEFAULT_K if k is None else k
            return self._retrieve(conversation.question, count, retrieval(options), chosen.ahead)

        def ends(reader: Reader) -> PromptEnds:
            first = reader.encoder.recipe.sees_prefix
            return conversation.around_passages(tokenizer, reader.format, self._system, first=first)

        return self._stream(ends, find, chosen)

    def complete(self, parts: str | Sequence[str | Hit | Passage], **options: Unpack[ReadOptions]) -> Answer:
        """Continue a raw prompt. Options as for `stream_completion`; the same events, collected."""
        return _answer(self.stream_completion(parts, **options))

    def stream_completion(
        self, parts: str | Sequence[str | Hit | Passage], **options: Unpack[ReadOptions]
    ) -> Iterator[Event]:
        """Continue raw text, passages where they stand in it; no chat template. Errors as for `stream`."""
        check_names(options, ReadOptions)
        chosen = self._reading(options)
        ends, inline = completion_ends(self.lm.tokenizer, parts)
        self._look([parts] if isinstance(parts, str) else [part for part in parts if isinstance(part, str)], chosen)
        self._drop_deleted()
        return self._stream(lambda reader: ends, lambda: inline, chosen)

    def _look(self, prompt: Iterable[str], reading: Reading) -> None:
        """Say so, once, where stored passages come as text to a method that would have used their KV."""
        if reading.method.reuses_blocks:
            self._plain_text.look(prompt)

    def _reading(self, options: ReadOptions) -> Reading:
        method = self._chosen(options.get("method"), options.get("method_options") or {})
        _present(self._reader).check(method)
        evict = options.get("evict")
        return Reading(
            method,
            self._evict if evict is None else SnapKV.of(evict),
            options.get("sampling") or Sampling(),
            options.get("on_overflow", "error"),
            options.get("cancelled"),
            options.get("timeout_s"),
            self._loader.ahead() if self._loader is not None and method.reuses_blocks else None,
            options.get("order", "relevance"),
            options.get("hint", True),
        )

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
        ends_of: Callable[[Reader], PromptEnds],
        find: Callable[[], Sequence[Hit | Passage]],
        reading: Reading,
    ) -> Iterator[Event]:
        clock = Clock(time.perf_counter())
        reader = _present(self._reader)
        ends = ends_of(reader)
        reader.prompt(ends, [], reading)  # a question that cannot be asked is not worth a search
        try:
            hits = find_passages(find(), self.store.documents, _present(self._whole))
            clock.retrieve_s = time.perf_counter() - clock.started
            _present(self._mini_notice).look(hits)
            yield from reader.stream(ends, hits, reading, clock)
        finally:
            if reading.ahead is not None:
                reading.ahead.close()
            end_team()

    def _stream_kept(
        self, conversation: Conversation, k: int | None, options: Mapping[str, Any], reading: Reading
    ) -> Iterator[Event]:
        clock = Clock(time.perf_counter())
        reader, memory = _present(self._reader), _present(self._turns)
        try:
            reader.check_keeps(reading)
            self._drop_deleted()
            form = None if k is None else reader.format
            pieces = conversation.in_pieces(self.lm.tokenizer, form, self._system)
            talk = KeptConversation(conversation, memory, self.lm.tokenizer, options.get("filter"), self._system)
            whole, documents = _present(self._whole), self.store.documents
            given = {turn: find_passages(own, documents, whole) for turn, own in inline_passages(conversation).items()}
            earlier, suffix_ids = talk.read(pieces, given)
            reader.prompt(reader.fit(earlier, suffix_ids, [], reading)[0], [], reading)
            hits = given.get(conversation.asking, [])
            if k is not None:
                hits = self._retrieve(conversation.question, k, options, reading.ahead)
            clock.retrieve_s = time.perf_counter() - clock.started
            _present(self._mini_notice).look(hits)
            ends, earlier, new = reader.fit(earlier, suffix_ids, hits, reading)
            yield from reader.stream(ends, new, reading, clock, Kept(earlier, talk.remember))
        finally:
            if reading.ahead is not None:
                reading.ahead.close()
            end_team()

    def _drop_deleted(self) -> None:
        """What was deleted, by another process too, may be in this one's memory still (law 10)."""
        generation = self.store.documents.generation()
        if generation != self._generation:
            self.store.kv.refresh()
            self._plain_text.forget()
            if self._reader is not None:
                self._reader.drop_deleted()
            self._generation = generation

    # Care

    def rates(self) -> RateFigures:
        """How fast this machine reads and computes blocks, as far as it was measured: now, or when the store was last
        closed by who had its models."""
        if self._rates is not None:
            return self._rates.figures()
        return self._kept_rates.read() or RateFigures()

    def load_counts(self) -> LoadCounts:
        """What came of choosing between loading and computing, since the store was opened."""
        return LoadCounts() if self._loader is None else self._loader.counts()

    def prefix_stats(self) -> PrefixStats:
        """What the prefix tree holds, with prefixes held as blocks, and what was found in it since the store was opened
        with its models."""
        return _present(self._reader).prefixes.stats()

    def info(self) -> Info:
        return info(self.store, self._usage)

    def doctor(self, *, timeout_s: float = 30.0) -> DoctorReport:
        """Verify every block and the index, and repair; see `ragcache.engine.care.maintenance.doctor`."""
        return doctor(self.store, index_kind=self.config.index, timeout_s=timeout_s)

    def close(self) -> None:
        """Write down the hit counts and let go of everything."""
        self._threads.close()
        if self._ingestor is not None:
            self._ingestor.close()
        if self._reader is not None:
            self._reader.clear()
        if self._loader is not None and self._rates is not None:
            self._loader.close()
            if not self.config.read_only and (figures := self._rates.figures()).is_measured:
                self._kept_rates.write(machine_key(self.lm), figures)
        if not self.config.read_only:
            self._usage.record(self.store.kv.stats())
        self.store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _listed(inputs: Inputs) -> list[Input]:
    return [inputs] if isinstance(inputs, str | os.PathLike | SourceFile | Document) else list(inputs)


def _answer(events: Iterator[Event]) -> Answer:
    for event in events:
        if isinstance(event, Done):
            return event.answer
    raise ConfigError("the stream ended without an answer")  # a Reader that breaks its contract


def _present(part: T | None) -> T:
    if part is None:
        raise ConfigError("the store was opened without its models (models=False); open it with them to ask or ingest")
    return part
