"""The engine that has vLLM answer: it makes prompts and layouts for vLLM's servers, and answers of their events."""

from __future__ import annotations

import logging
import time
from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ragcache.engine.answer import Answer, Done, Event, Source, Sources, Usage
from ragcache.engine.caches.prefix_cache import PrefixStats
from ragcache.engine.contract import reads_by_layout
from ragcache.engine.kv_lookup import UNUSED
from ragcache.engine.loader import COMPUTED
from ragcache.engine.output import OutputProcessor, sources_of, write
from ragcache.engine.prompts import Prompts
from ragcache.engine.request import Clock, Request, RequestOptions
from ragcache.engine.verdict import FULL
from ragcache.errors import ConfigError
from ragcache.fusion import METHODS
from ragcache.fusion.layout import Layout, Span
from ragcache.fusion.method import FusionMethod
from ragcache.ingest.encoder import BlockKeys
from ragcache.kv.block_key import Neighbours, digest
from ragcache.models.card import ModelCard, eos_token_ids
from ragcache.models.sampler import Sampling
from ragcache.models.scheduler import PassStats
from ragcache.store.kv_store import KVStore
from ragcache_vllm.client import Completion, VllmClient
from ragcache_vllm.request_layout import RequestLayout, served_name

log = logging.getLogger(__name__)
NEVER = -100.0  # the least value in OpenAI's protocol
NO_PREFIXES = PrefixStats(0, 0, 0, 0, 0, 0, 0)


class CompletionRequest(NamedTuple):
    """A request to the engine.

    ids:     the prompt
    layout:  which of its tokens stored blocks hold; None: no blocks are used
    sources: the passages, with where their KV is
    """

    ids: list[int]
    layout: RequestLayout | None
    sources: list[Source]

    @property
    def routing_key(self) -> str:
        """Return a key that sends questions with the same best passage to the same server, since most share other
        passages too.
        """
        return next((source.handle for source in self.sources if source.handle), "") or digest(self.ids)

    @property
    def stored_tokens(self) -> int:
        """Return the number of tokens that the engine need not compute."""
        if self.layout is None:
            return 0
        return len(self.ids) - sum(span.num_tokens for span in self.layout.computed(len(self.ids)))


class VllmEngine:
    """An engine whose model runs in vLLM's servers, which read this store's blocks. Thread-safe."""

    def __init__(self, card: ModelCard, prompts: Prompts, kv: KVStore, engine: VllmClient) -> None:
        self.card = card
        self.prompts = prompts
        self._kv = kv
        self._engine = engine
        self._eos = eos_token_ids(card)

    def of(self, salt: str) -> VllmEngine:
        """Return the engine for questions whose KV has another salt."""
        prompts = self.prompts.of(replace(self.prompts.block_keys, salt=salt))
        return VllmEngine(self.card, prompts, self._kv, self._engine)

    def check(self, options: RequestOptions) -> None:
        """Raise ConfigError for options that vLLM's servers cannot follow."""
        self.prompts.check(options.method)
        options.sampling.check_ids(self.card.vocab_size, self.card.name)
        if options.thinking_budget is not None:
            raise ConfigError(
                f"thinking_budget is kept where the tokens are chosen, which is {self._engine.url}; leave it out",
                "thinking_budget",
            )
        if options.method.reuses_blocks and not self.prompts.block_keys.recipe.is_dense:
            raise ConfigError(
                f"this store's blocks are of recipe {self.prompts.block_keys.recipe}: they leave out tokens, and "
                f"{self._engine.url} reads passages whole; leave out the engine, or make a store with all KV"
            )
        self._reruns(options, Layout(()))

    def stream(self, request: Request) -> Generator[Event, None, None]:
        """Yield the events of an answer. Raises EngineError, ModelMismatchError, CancelledError and TimedOutError."""
        options = request.options
        completion = self._request(request)
        yield Sources(completion.sources, options.choice.label, options.choice.why)
        request.limit.check()
        most = self.prompts.room(len(completion.ids), options)
        output, answering = OutputProcessor(), None
        try:
            if most:
                body = self._body(completion, options, most)
                answering = self._engine.complete(body, request.limit, completion.routing_key)
                steps = self._steps(answering, options, request.clock, output)
                yield from write(self.card, request, steps, most, output)
                answering.end()
        finally:
            if answering is not None:
                answering.close()
        if request.earlier_turns is not None:
            request.earlier_turns.answered(request.hits, output.turn, output.said(self.card))
        yield Done(self._answer(request, completion, answering, output))

    def clear(self) -> None:
        self._engine.close()

    def warm_up(self) -> None:
        """Do nothing: the engine warms up when it starts."""

    def prefix_stats(self) -> PrefixStats:
        return NO_PREFIXES

    def pass_stats(self) -> PassStats:
        return PassStats()

    def _request(self, request: Request) -> CompletionRequest:
        """Return the request to vLLM.

        It has no layout, so that vLLM computes the whole prompt, if the method reuses no blocks, a passage has no block
        yet, or the passages are of several collections. Raises ConfigError if vLLM cannot place blocks by this layout.
        """
        hits, layout = request.all_hits, request.plan.layout
        names = self.prompts.block_keys.passing(request.options.where)
        chunks = names.with_neighbours([hit.chunk for hit in hits])
        handles = [names.key_of(chunk) for chunk in chunks]
        if not layout.separate or not handles:
            return CompletionRequest(layout.ids, None, sources_of(request, handles, [UNUSED] * len(handles)))
        reruns = self._reruns(request.options, layout)
        stored = self._kv.lookup(handles)
        absent = sum(handle not in stored for handle in handles)
        salts = {names.salt if hit.chunk.salt is None else hit.chunk.salt for hit in hits}
        if len(salts) > 1:
            log.warning("the passages are of several collections: the engine reads the prompt")
            return CompletionRequest(layout.ids, None, sources_of(request, handles, [UNUSED] * len(handles)))
        if absent:
            log.warning("%d of %d passages have no KV yet: the engine reads the prompt", absent, len(hits))
            return CompletionRequest(layout.ids, None, sources_of(request, handles, [COMPUTED] * len(handles)))
        near = [chunk.neighbours for chunk in chunks]
        sent = self._layout(request, layout, reruns, replace(names, salt=salts.pop()), near)
        return CompletionRequest(
            layout.ids, sent, sources_of(request, handles, [stored[handle].tier for handle in handles])
        )

    def _reruns(self, options: RequestOptions, layout: Layout) -> list[Span]:
        """Return the tokens in blocks that the method computes again.

        Raises ConfigError for a method that selects or weighs tokens while the model runs.
        """
        reruns = options.method.reruns(layout)
        if reruns is None:
            plain = [
                name for name, kind in METHODS.items() if not kind.needs_training and reads_by_layout(self.card, kind())
            ]
            own = dict.fromkeys(plain if self.card.reuse is None else [self.card.default_method, FULL])
            raise ConfigError(
                f"method {options.method.name!r} chooses or weighs tokens while the model runs, and {self._engine.url} "
                f"runs it without; use {' or '.join(map(repr, own))} there, or leave out the engine"
            )
        return reruns

    def _layout(
        self,
        request: Request,
        layout: Layout,
        reruns: Sequence[Span],
        names: BlockKeys,
        near: Sequence[Neighbours],
    ) -> RequestLayout:
        """Return the layout to send with a request.

        reruns: tokens in blocks that are computed again
        names: makes the keys of the passages' blocks, which all have its salt
        near: the neighbours of each passage

        Raises ConfigError if the recipe has a primer and the prompt does not begin as the store's prompts do.
        """
        first = names.first_ids
        placed = layout.placed()
        blocks = [Span(piece.start, piece.end) for piece in placed]
        neighbours = [near[piece.passage] for piece in placed if piece.passage is not None]
        seen = len(request.options.method.prefix_ids(self.card, request.prompt)) if names.recipe.sees_prefix else 0
        if names.recipe.primer_ids and tuple(layout.ids[:seen]) != tuple(first):
            raise ConfigError(
                "this store's blocks are read behind its own prefix and a primer, and a request to another engine "
                "names them by how its prompt begins; leave system= out, or leave out the engine"
            )
        if seen in (0, len(first)) and self._has_beginning(layout, names):
            blocks, seen = [Span(0, len(first)), *blocks], len(first)
            neighbours = [(), *neighbours]
        own = tuple(neighbours) if any(neighbours) else ()
        return RequestLayout(tuple(blocks), tuple(reruns), seen, names.recipe, names.salt, own)

    def _has_beginning(self, layout: Layout, names: BlockKeys) -> bool:
        """Return whether the prompt begins as the store's prompts do, and that beginning is stored as a block."""
        first, key = names.first_ids, names.first_key
        begins = layout.pieces[0].passage is None and layout.pieces[0].ids[: len(first)] == first
        return begins and key is not None and key in self._kv

    def _body(self, completion: CompletionRequest, options: RequestOptions, most: int) -> dict[str, Any]:
        body: dict[str, Any] = {
            "prompt": completion.ids,
            "max_tokens": most,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            **_sampling(options.sampling),
            # End answers by the embedded engine's ids, whatever vLLM takes as the end.
            "ignore_eos": True,
            "stop_token_ids": [*self._eos, *options.sampling.stop_token_ids],
        }
        biases = {**options.sampling.logit_bias, **dict.fromkeys(sorted(self.card.suppress_tokens), NEVER)}
        if biases:
            body["logit_bias"] = {str(id): bias for id, bias in biases.items()}
        if completion.layout is not None:
            body["kv_transfer_params"] = completion.layout.to_params()
        if self.prompts.block_keys.salt:  # vLLM's own prefix cache is shared by all views
            body["cache_salt"] = digest({"salt": self.prompts.block_keys.salt})
        return body

    def _steps(
        self, answering: Completion, options: RequestOptions, clock: Clock, output: OutputProcessor
    ) -> Generator[int, None, None]:
        """Yield the answer's ids, without the id that ends it; log-probabilities, if any, are added to `output`."""
        sent = time.perf_counter()
        ends = {*self._eos, *options.sampling.stop_token_ids}
        for rank, (id, scores) in enumerate(answering.tokens()):
            if not rank:
                clock.read(prefill_s=time.perf_counter() - sent)
            if id in ends:
                return
            if scores is not None:
                output.scores.append(scores)
            yield id

    def _answer(
        self, request: Request, completion: CompletionRequest, answering: Completion | None, output: OutputProcessor
    ) -> Answer:
        told = None if answering is None else answering.cached_tokens
        if told is not None and told < completion.stored_tokens:
            log.warning(
                "%s computed %d tokens that this store's blocks hold: its log says why; start it over this store",
                self._engine.url,
                completion.stored_tokens - told,
            )
        cached = completion.stored_tokens if told is None else told
        num_tokens = len(completion.ids)
        usage = Usage(num_tokens, cached, len(output.ids), 0, num_tokens - cached, output.reasoning_tokens)
        return output.answer(request, completion.sources, usage)


def _sampling(sampling: Sampling) -> dict[str, Any]:
    """Return all sampling parameters, because vLLM would take absent ones from the model's generation configuration."""
    return {
        "temperature": sampling.temperature,
        "top_p": 1.0 if sampling.top_p is None else sampling.top_p,
        "top_k": sampling.top_k or 0,
        "min_p": sampling.min_p or 0.0,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "seed": sampling.seed,
        "stop": list(sampling.stop),
        **_form(sampling),
        **({} if sampling.logprobs is None else {"logprobs": sampling.logprobs, "return_tokens_as_token_ids": True}),
    }


def _form(sampling: Sampling) -> dict[str, Any]:
    """Return the answer's constraint by vLLM's own names."""
    forms = {"json": sampling.json_schema, "regex": sampling.regex, "choice": sampling.choices}
    given = {name: form for name, form in forms.items() if form is not None}
    return {"structured_outputs": given} if given else {}


class VllmConnection(VllmClient):
    """Connection to vLLM servers of a model that can answer over a store's blocks."""

    def reads(self, card: ModelCard, method: FusionMethod) -> bool:
        """Return whether the servers can read stored blocks by this method."""
        return reads_by_layout(card, method)

    def engine(self, card: ModelCard, prompts: Prompts, kv: KVStore) -> VllmEngine:
        """Return an engine whose model runs in these servers, over a store's blocks."""
        return VllmEngine(card, prompts, kv, self)


def connect(url: str, fingerprint: str, key: str | None) -> VllmConnection:
    """Return a connection to the servers at an address, for the store's model.

    url: "vllm://host:port", or several, separated by commas
    fingerprint: of the model, in its block keys

    Raises ConfigError for an invalid address.
    """
    return VllmConnection(url, served_name(fingerprint), key)
