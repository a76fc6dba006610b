"""The engine: documents in, answers out."""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any, Self, Unpack

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedModel

from ragcache.engine.admission import Admission
from ragcache.engine.aio import Threads, cancellable, streamed, threaded
from ragcache.engine.answer import Answer, Event, Reason
from ragcache.engine.assemble import (
    Components,
    OpenOptions,
    assemble,
    embedded_engine,
    open_embedded,
    open_engine,
    open_model,
    open_retriever,
    open_workers,
)
from ragcache.engine.caches.prefix_cache import PrefixStats
from ragcache.engine.contract import EMBEDDED, EmbeddedModel
from ragcache.engine.history import ConversationCache
from ragcache.engine.loader import LoadCounts
from ragcache.engine.many import answer_of, ask_many
from ragcache.engine.options import (
    DEFAULT_K,
    AskOptions,
    ChatOptions,
    GenerationOptions,
    RetrieveOptions,
    StoreConfig,
    check_names,
    said,
)
from ragcache.engine.passages import Passage
from ragcache.engine.precompute import Precompute, PrecomputeReport
from ragcache.engine.questions import Questions
from ragcache.engine.rates import RateFigures, machine_key
from ragcache.engine.size_estimate import KVEstimate, bytes_per_token, estimate_kv
from ragcache.engine.store import Store
from ragcache.engine.store_config import open_store
from ragcache.engine.verdict import AUTO
from ragcache.errors import ConfigError, check_type
from ragcache.fusion import get_method, methods
from ragcache.fusion.method import FusionMethod
from ragcache.ingest.chunker import ChunkerConfig
from ragcache.ingest.document import Document
from ragcache.ingest.encoder import ModelEncoder
from ragcache.ingest.ingest_run import Input
from ragcache.ingest.pipeline import Ingestor
from ragcache.ingest.read_limits import NO_TOKEN_LIMITS, IngestConfig, TokenLimits
from ragcache.ingest.readers import SourceFile
from ragcache.ingest.report import IngestReport, Progress
from ragcache.ingest.worker import WORKERS, WorkersConfig
from ragcache.kv.block_key import Recipe
from ragcache.models.block_model import BlockModel
from ragcache.models.card import ModelCard
from ragcache.models.language_model import LanguageModel
from ragcache.models.scheduler import PassStats
from ragcache.plugins import load
from ragcache.prompt import encode_text
from ragcache.retrieval.embedder_types import Embedder
from ragcache.retrieval.reranker import Reranker
from ragcache.retrieval.retriever import Hit, Retriever
from ragcache.runtime import team_ends
from ragcache.store.collections import View
from ragcache.store.schema import DEFAULT

log = logging.getLogger(__name__)
Inputs = Iterable[Input] | Input


class RagCache(Store):
    """A knowledge base: a store, a language model and an embedder.

    Create it with `RagCache.open`. It is thread-safe: several threads may ask while another ingests. Several processes
    may open the same store, but only one process can ingest at a time.
    """

    def __init__(self, parts: Components) -> None:
        Store.__init__(self, parts.store, parts.config)
        self._threads = Threads()
        self._parts = parts
        self._engine = parts.engine
        self._questions = Questions(parts)

    @classmethod
    def open(
        cls,
        path: str | Path,
        *,
        model: str | Path | LanguageModel | PreTrainedModel | None = None,
        method: str | FusionMethod | None = None,
        embedder: str | Path | Embedder | None = None,
        reranker: str | Path | Reranker | None = None,
        recipe: str | Recipe | None = None,
        dtype: str | None = None,
        device: str = "auto",
        system: str | None = None,
        question_format: str | None = None,
        chunker: ChunkerConfig | None = None,
        ingest: IngestConfig | None = None,
        store: StoreConfig | None = None,
        create: bool = True,
        engine: str | None = None,
        engine_key: str | None = None,
        **method_options: Any,
    ) -> Self:
        """Open the store at `path`, or create it.

        model:    bundled name, directory (also of a LoRA adapter), hub id, or a loaded model (a LanguageModel or a
                  transformers model, which must be passed again at every opening); None: the store's own model, "mini"
                  for a new store
        method:   fusion method, with its options as further keyword arguments; None: the method that the model was
                  trained for, else the cheapest that passed `ragcache check`, else `choose_method`'s; "auto": the
                  same, but a verdict of `ragcache check` has priority over the training
        embedder: "minilm", "contriever", directory, hub id or an Embedder; None: the store's own, "minilm" for a new
                  store
        reranker: directory or hub id of a cross-encoder, or a Reranker, that chooses among the search results; see the
                  option `rerank`
        recipe:   how chunks are encoded; None: after the primer that the store was created with, if any; else as the
                  model was trained; else, in an empty store, after a primer and two neighbours (see
                  `StoreConfig.neighbours`); else by the method's first recipe. A share of kept KV (`Recipe.kept`)
                  below 1 cannot be changed later
        dtype, device: of the models, see `load_lm`; a store keeps the dtype that it was created with
        system, question_format: see `ragcache.prompt.prompt_format`
        chunker, ingest, store: how documents are cut, how they are ingested, and how the store is opened
        create:   create the store if it does not exist
        engine:   what runs the model. "vllm://host:port": a `ragcache vllm` over this store; no weights are loaded
                  here, `model` says where to find tokenizer and configuration, and documents are added without KV.
                  "llama.cpp": llama.cpp in this process, from a GGUF file, with options as in
                  "llama.cpp:n_ctx=16384,kv=q8_0". None: the engine in this process that the store was created with:
                  transformers, or an engine such as llama.cpp
        engine_key: the key that the engine at an address requires

        `Store.open` lists, deletes and checks documents without loading models.

        Raises StoreNotFoundError, StoreMismatchError (model, embedder, recipe, database or schema version), SealError,
        StoreReadOnlyError, ModelError, EmbedderError, RerankerError, ConfigError, EngineError, PromptError.
        """
        elsewhere = [name for name in method_options if said(name, ()) is not None]
        # `methods` imports every method, so only where a name may be a method's option.
        of_methods = {name for method in methods() for name in method.options} if elsewhere else set()
        check_names([name for name in elsewhere if name not in of_methods], list(signature(cls.open).parameters))
        if "models" in method_options:
            raise ConfigError("models=False is no option; Store.open opens a store without its models")
        if method is not None and method != AUTO:  # refuse a wrong method before creating a store
            method, method_options = get_method(method, **method_options), {}
        cut, settings, config = chunker or ChunkerConfig(), ingest or IngestConfig(), store or StoreConfig()
        chosen = OpenOptions(method, method_options, recipe, system, question_format, cut, settings)
        opened = open_store(path, config, create=create)
        try:
            if engine is None and not isinstance(model, LanguageModel | PreTrainedModel):
                engine = embedded_engine(opened.documents)
            card: ModelCard
            if engine is not None and engine.partition(":")[0] in EMBEDDED:
                card, remote = open_embedded(opened.documents, model, engine), None
            elif engine is not None:
                card, remote = open_engine(opened.documents, model, engine, engine_key)
            else:
                card, remote = open_model(opened.documents, model, dtype, device), None
            retriever = open_retriever(opened, config, embedder, reranker, device)
            return cls(assemble(opened, config, card, retriever, chosen, remote))
        except BaseException:
            opened.close()
            raise

    def _seen(self, view: View, salt: str, secret: str) -> Self:
        made, parts = super()._seen(view, salt, secret), self._parts
        documents, ingestor = made.store.documents, copy(parts.ingestor)
        engine = parts.engine.of(salt)
        keys = engine.prompts.block_keys
        if view.into is not None:
            view = view.only(view.into)
        ingestor.documents, ingestor.block_keys = documents.seen_by(view), replace(keys, salt=secret)
        made._parts = replace(
            parts,
            store=made.store,
            engine=engine,
            block_keys=keys,
            estimate=getattr(engine, "estimate", parts.estimate),
            ingestor=ingestor,
            turns=ConversationCache(documents, salt),
        )
        made._questions = self._questions.of(made._parts)
        return made

    # Parts

    @property
    def lm(self) -> ModelCard:
        """Return the model: a LanguageModel if it runs in this process."""
        return self._parts.card

    @property
    def retriever(self) -> Retriever:
        return self._parts.retriever

    @property
    def ingestor(self) -> Ingestor:
        """Return the part that reads, cuts and stores documents."""
        return self._parts.ingestor

    @property
    def embedder(self) -> Embedder:
        return self.retriever.embedder

    @property
    def method(self) -> str:
        """Return the name of the method that reads questions by default; "auto": decided for each question."""
        return self._parts.choice.name

    @property
    def reads_blocks(self) -> bool:
        """Return whether the default method reads passages from their KV blocks, at any position in the prompt."""
        return self._parts.choice.method.reuses_blocks

    @property
    def admission(self) -> Admission:
        """Return the budget of KV that all answers in progress share, and its present use."""
        return self._parts.admission

    def count_tokens(self, text: str) -> int:
        """Count the language model's tokens of `text`, without special tokens."""
        return len(encode_text(self.lm.tokenizer, text))

    def full_prefill_estimate_s(self, num_tokens: int) -> float | None:
        """Estimate the seconds that a full prefill of `num_tokens` would take here.

        The estimate follows the fastest of this process's full reads: prompts under `full`, and encoded passages.
        Returns None before the first of them.
        """
        return self._parts.estimate.seconds(num_tokens)

    @property
    def full_prefill_samples(self) -> int:
        """Return how many reads `full_prefill_estimate_s` was learnt from."""
        return self._parts.estimate.samples

    # Documents

    @team_ends()
    def ingest(
        self,
        inputs: Inputs,
        *,
        kv: str | None = None,
        split: bool = True,
        replace: bool = True,
        sync: bool = False,
        dry_run: bool = False,
        ray: WorkersConfig | str | bool | None = None,
        progress: Progress | bool | None = None,
        timeout_s: float = 30.0,
        cancelled: threading.Event | None = None,
        limits: TokenLimits = NO_TOKEN_LIMITS,
    ) -> IngestReport:
        """Store files, folders and Document objects; see `Ingestor.ingest`.

        kv: when KV is computed; None: "eager", or "lazy" if the model runs in another engine
        replace:  False: a document whose id is stored with another text fails (DocumentExistsError)
        split:    False stores every document unchanged as a single passage, whose chunk has the document's id
        sync:     delete documents whose files have vanished from the given files and folders, and follow renames
        dry_run:  change nothing; the report says what would change
        ray:      read, embed and encode on a Ray cluster: its address, a RayConfig, or True for a local Ray that is
                  started for this call; this process stores the documents
        progress: a callback of ProgressEvents, or True for bars on the terminal, which also show the KV's disk space:
                  an estimate before, the exact number afterwards
        timeout_s: seconds to wait for another writer
        cancelled: set it to stop
        limits: a document with more tokens fails before its KV is computed; see `token_limits`

        Raises the errors of `Ingestor.ingest`.
        """
        self._check_open()
        if ray and isinstance(self.lm, EmbeddedModel):
            raise ConfigError(
                "workers of a cluster run transformers, which cannot compute this store's KV; leave ray out"
            )
        listed, chosen = _listed(inputs), load("workers", "ray", WORKERS).of(ray) if ray else None
        run = partial(
            self._parts.ingestor.ingest,
            listed,
            kv=self._kv_mode() if kv is None else kv,
            chunker=None if split else self._parts.whole,
            replace=replace,
            sync=sync,
            dry_run=dry_run,
            cluster=None if chosen is None else open_workers(self.store, self.config, chosen),
            timeout_s=timeout_s,
            cancelled=cancelled,
            limits=limits,
        )
        if progress is not True:
            return run(progress=progress or None)
        from ragcache.ingest.progress import progress_bars, say_line

        if isinstance(self.lm, BlockModel):
            say_line(str(self.estimate_kv(listed)))
        with progress_bars() as bars:
            report = run(progress=bars)
        if not dry_run:
            say_line(report.kv_text)
        return report

    @team_ends()
    def copy(
        self, other: Store, *, kv: str = "eager", progress: Progress | None = None, timeout_s: float = 30.0
    ) -> IngestReport:
        """Store the documents of another store, which may use another model; see `Ingestor.copy`.

        Each document goes to a collection of the same name, or, if this object shows a single collection, to that
        collection.
        """
        report, is_whole = IngestReport(), self.store.documents.view.reads is None
        for name in other.collections():
            public = other._collections.secret(name) == ""
            to = self.collection(name, public=public) if is_whole and name != DEFAULT else self
            source = other.collection(name, create=False).store.documents
            report.extend(to._parts.ingestor.copy(source, kv=kv, progress=progress, timeout_s=timeout_s))
        return report

    @team_ends()
    def precompute(
        self,
        given: Any,
        *,
        collection: str = "",
        sync: bool = False,
        dry_run: bool = False,
        progress: Progress | None = None,
        cancelled: threading.Event | None = None,
    ) -> PrecomputeReport:
        """Compute the KV of passages that stay in their own store, so that any prompt that holds them can reuse it.

        Nothing is embedded and no text is kept. Ids, titles and metadata are kept for the sources of answers.

        given: a text, `Document` (not cut), `Passage`, `Hit` or `Chunk`; a document, node, retriever or vector store of
               LangChain or LlamaIndex; or an iterable of these
        collection: name of the place they come from; a vector store supplies its own. A passage with an id replaces the
                    passage that had this id in the collection
        sync: `given` is the whole collection: remove the KV of passages that are not in it
        dry_run: compute and change nothing; the report says whose KV is present
        progress: callback of ProgressEvents, whose counts are of passages
        cancelled: set it to stop; KV that was already kept stays

        A passage that the model cannot read is listed in the report, and the others continue. KV is kept within the
        budget of `StoreConfig.foreign_cache`. Raises ConfigError (no such budget, passages that cannot be listed, a
        model in another engine), CancelledError, StoreReadOnlyError, StoreFullError, StoreBusyError.
        """
        self._check_open()
        return Precompute(self._parts).run(
            given, collection=collection, sync=sync, dry_run=dry_run, progress=progress, cancelled=cancelled
        )

    def forget(
        self, ids: Iterable[str] | str = (), *, sources: Iterable[str] = (), given: Any = None, collection: str = ""
    ) -> list[str]:
        """Remove KV that `precompute` made and that nothing else refers to; return its handles.

        ids, sources: of passages of the collection; a source is the document that a passage was cut from
        given: the passages themselves, as for `precompute`

        KV of the store's own documents stays; use `delete` for those. Raises ConfigError, StoreReadOnlyError,
        StoreBusyError.
        """
        self._check_open()
        chunk_ids = [ids] if isinstance(ids, str) else ids
        return Precompute(self._parts).forget(chunk_ids, sources, given, collection)

    def _kv_mode(self) -> str:
        if self._encoder is not None:
            return "eager"
        log.warning("documents are stored without KV: the engine computes answers alone, and `ragcache ingest` the KV")
        return "lazy"

    def estimate_kv(self, inputs: Inputs) -> KVEstimate:
        """Estimate the disk space for the KV of files, folders and Document objects, from a sample of their text."""
        encoder, longest = self._parts.block_keys.encoder, self._parts.ingestor.chunker.settings["max_tokens"]
        return estimate_kv(_listed(inputs), encoder.lm, self.config.codec, longest, encoder.recipe.kept)

    def token_limits(self, document: int | None, call: int, kv_bytes: int, seconds: float) -> TokenLimits:
        """Return limits on the tokens of an ingestion, as `ingest` takes them.

        document: most tokens of a document; None: any number
        call: most tokens of all documents together
        kv_bytes, seconds: the most that the KV of all documents together may take on disk, and to compute. The time is
                           limited only once the machine's rate has been measured
        """
        bounds = {f"allowed in an addition ({call:,} tokens)": call}
        if self._encoder is not None and isinstance(self.lm, LanguageModel):
            block_tokens = self._parts.ingestor.chunker.settings["max_tokens"]
            each = bytes_per_token(self.lm, self.config.codec, block_tokens, self._encoder.recipe.kept)
            bounds[f"allowed in an addition (their KV takes {kv_bytes:,} bytes)"] = int(kv_bytes / each)
            if (rate := self.rates().prefill_tokens_s) is not None:
                bounds[f"allowed in an addition (they take {seconds:g} s to read)"] = int(seconds * rate)
        reason = min(bounds, key=bounds.__getitem__)
        return TokenLimits(document, bounds[reason], reason)

    def vectors(self, ids: Iterable[str]) -> NDArray[np.float32]:
        """Return the embeddings of `chunks(ids)`: float32 [n, dimension]."""
        return self.store.documents.vectors(ids, self.embedder.dimension)

    pin = team_ends()(Store.pin)

    @property
    def _encoder(self) -> ModelEncoder | None:
        names = self._parts.block_keys
        return names if isinstance(names, ModelEncoder) else None

    def _open_index(self) -> Retriever:
        return self.retriever

    def _forget_deleted(self) -> None:
        self._parts.generation.check()

    # Questions

    def retrieve(
        self, question: str | NDArray[np.float32], k: int = DEFAULT_K, **options: Unpack[RetrieveOptions]
    ) -> list[Hit]:
        """Return the k chunks nearest to the question (text, or its vector), best first; see `Retriever.retrieve`."""
        self._check(options, RetrieveOptions)
        return self._questions.retrieve(question, k, options)

    def ask(self, question: str, k: int = DEFAULT_K, **options: Unpack[AskOptions]) -> Answer:
        """Answer a question from the store. Takes the options of `stream` and collects its events."""
        return answer_of(deque(self.stream(question, k, **options), maxlen=1))

    def ask_many(self, questions: Iterable[str], k: int = DEFAULT_K, **options: Unpack[AskOptions]) -> list[Answer]:
        """Answer questions concurrently, so that they share the model's passes. Answers keep the questions' order.

        options: as for `ask`, applied to every question

        The first error cancels the other questions and is raised.
        """
        self._check(options, AskOptions)
        return ask_many(partial(self.ask, k=k, **options), questions, options.get("cancelled"))

    def stream(self, question: str, k: int = DEFAULT_K, **options: Unpack[AskOptions]) -> Iterator[Event]:
        """Answer a question; yield its sources, then tokens, then the whole answer.

        options: `AskOptions`: which passages to find (`RetrieveOptions`) or `hits` to read instead, and how to read and
                 answer (`GenerationOptions`)

        Concurrent answers share the model's passes and the memory of `StoreConfig.answer_bytes`. An answer that does
        not fit waits until others end, so close a stream that you do not read to its end.

        Raises PromptError, ContextTooLongError, AnswerTooLargeError, ConfigError, FilterError, UnknownHandleError,
        CancelledError, TimedOutError.
        """
        self._check(options, AskOptions)
        return self._questions.stream(self._questions.ask(question, k, options))

    def chat(self, messages: Sequence[Mapping[str, Any]], **options: Unpack[ChatOptions]) -> Answer:
        """Answer a conversation. Takes the options of `stream_chat` and collects its events."""
        return answer_of(deque(self.stream_chat(messages, **options), maxlen=1))

    def stream_chat(self, messages: Sequence[Mapping[str, Any]], **options: Unpack[ChatOptions]) -> Iterator[Event]:
        """Continue a conversation; yield its sources, then tokens and tool calls, then the whole answer.

        messages: {"role": "system" | "user" | "assistant" | "tool", "content": text, or a list of texts and passages}.
                  Passages (of the last message that has any) are read at their position; only white space may separate
                  them. Tool calls and results are as in OpenAI's API: an assistant's "tool_calls" (or `ToolCall`s), and
                  a tool's "tool_call_id". If the last message is the assistant's, the answer continues its text
        options:  `ChatOptions`: `passages`, or `k` and which to find, `context`, `tools`, and how to read and answer

        Without passages and k the model answers from the conversation alone. Raises the errors of `stream`.
        """
        self._check(options, ChatOptions)
        return self._questions.stream(self._questions.chat(messages, options))

    def why(self, asked: str | Sequence[Mapping[str, Any]], k: int | None = None, **options: Any) -> list[Reason]:
        """Say for each passage of a question why it is, or is not, read from stored KV. Nothing is read or computed.

        asked: a question, or the messages of a conversation
        k: how many passages are retrieved; None: DEFAULT_K for a question, none for a conversation
        options: those of `ask`, or of `chat`

        Returns a reason for each passage of the prompt, in order, then for each stored passage that occurs in the
        prompt's text with some tokens changed. Raises the errors of `ask` and `chat`.
        """
        self._check(options, AskOptions if isinstance(asked, str) else ChatOptions)
        keywords: Any = options if k is None else {**options, "k": k}
        if isinstance(asked, str):
            return self._questions.why(self._questions.ask(asked, DEFAULT_K if k is None else k, keywords))
        return self._questions.why(self._questions.chat(asked, keywords))

    def count_chat(self, messages: Sequence[Mapping[str, Any]], **options: Unpack[ChatOptions]) -> int:
        """Count the tokens of a conversation's prompt. Takes the options of `stream_chat` and raises its errors.

        Passages in its messages are counted. Passages that would be retrieved, or are given by `passages`, are not.
        """
        self._check(options, ChatOptions)
        return self._questions.count_chat(messages, options)

    def complete(
        self, parts: str | Sequence[str | Hit | Passage | int], **options: Unpack[GenerationOptions]
    ) -> Answer:
        """Continue a raw prompt. Takes the options of `stream_completion` and collects its events."""
        return answer_of(deque(self.stream_completion(parts, **options), maxlen=1))

    def stream_completion(
        self, parts: str | Sequence[str | Hit | Passage | int], **options: Unpack[GenerationOptions]
    ) -> Iterator[Event]:
        """Continue raw text, passages at their position in it, or token ids, without a chat template.

        Raises the errors of `stream`.
        """
        self._check(options, GenerationOptions)
        return self._questions.stream(self._questions.complete(parts, options))

    # The same for an event loop: arguments and errors are those of the call without the "a". Cancelling the task, or
    # closing a stream, stops the work; stored data stays.

    aingest = cancellable(ingest)
    adelete = threaded(Store.delete)
    aprecompute = cancellable(precompute)
    aforget = threaded(forget)
    aretrieve = threaded(retrieve)
    aask = cancellable(ask)
    aask_many = cancellable(ask_many)
    achat = cancellable(chat)
    acomplete = cancellable(complete)
    astream = streamed(stream)
    astream_chat = streamed(stream_chat)
    astream_completion = streamed(stream_completion)

    # Maintenance

    def rates(self) -> RateFigures:
        """Return how fast this machine reads and computes blocks, with the rates measured so far."""
        loader = self._parts.loader
        return loader.rates.figures() if loader is not None and loader.chooses else super().rates()

    def load_counts(self) -> LoadCounts:
        """Return how often loading and computing were chosen since the store was opened."""
        loader = self._parts.loader
        return LoadCounts() if loader is None else loader.counts()

    def prefix_stats(self) -> PrefixStats:
        """Return the contents of the prefix tree, and its hits since the store was opened."""
        return self._engine.prefix_stats()

    def pass_stats(self) -> PassStats:
        """Return counts of the model's passes in this process."""
        return self._engine.pass_stats()

    @team_ends()
    def warm_up(self) -> None:
        """Run the model once now, because its first pass takes longer and would delay the first question."""
        self._engine.warm_up()

    def _let_go(self) -> None:
        self._threads.close()
        self._parts.ingestor.close()
        if self._questions.learner is not None:
            self._questions.learner.close()
        self._engine.clear()
        self._parts.generation.close()
        if (loader := self._parts.loader) is not None:
            loader.close()
            figures = loader.rates.figures()
            keeps = loader.chooses and figures.is_measured and not self.config.read_only and self.store.layout.exists()
            if keeps and isinstance(self.lm, LanguageModel):
                figures.write(self.store.rates, machine_key(self.lm))
        super()._let_go()


def _listed(inputs: Inputs) -> list[Input]:
    kinds = (os.PathLike, SourceFile, Document, Iterable)
    check_type("inputs", inputs, kinds, "give paths, folders, or rc.Document objects")
    return [inputs] if isinstance(inputs, str | os.PathLike | SourceFile | Document) else list(inputs)
