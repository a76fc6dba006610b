"""One question, from its text to the last token of its answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import NamedTuple, get_args

from ragcache.engine.answer import Answer, Done, Event, Source, Sources, Timings, Token, Usage
from ragcache.engine.asking.admission import Admission, kv_bytes
from ragcache.engine.asking.contexts import Contexts
from ragcache.engine.asking.estimate import PrefillEstimate
from ragcache.engine.asking.kept import Earlier
from ragcache.engine.asking.ordering import ReadCounts, relevance_hint, shared_order
from ragcache.engine.asking.prefixes import Path, Prefix, Prefixes
from ragcache.engine.loading.blocks import LoadedBlocks, load_or_compute
from ragcache.engine.loading.loader import Ahead, BlockLoader
from ragcache.engine.options import Order, Overflow
from ragcache.errors import ConfigError, ContextTooLongError
from ragcache.fusion.base import FusionMethod
from ragcache.fusion.eviction import SnapKV
from ragcache.fusion.fuse import Fused, block_recipe, fuse
from ragcache.fusion.layout import Additions
from ragcache.ingest.encoder import ModelEncoder
from ragcache.kv.buffers import SharedContext
from ragcache.kv.exact import Exact
from ragcache.models.decoding import Sampling, TextStream, decode, eos_token_ids
from ragcache.models.limits import Limit, limited
from ragcache.models.lm import LanguageModel
from ragcache.prompt import Prompt, PromptEnds, PromptFormat, control_tokens, encode_text
from ragcache.retrieval.retriever import Hit
from ragcache.store.documents import DocumentStore
from ragcache.store.kv_store import KVStore

UNUSED = "unused"
EXACT = "exact"
SHARED = "shared"


@dataclass(frozen=True)
class Reading:
    """How one prompt is read and answered; see `ReadOptions`."""

    method: FusionMethod
    evict: SnapKV | None = None
    sampling: Sampling = field(default_factory=Sampling)
    on_overflow: Overflow = "error"
    cancelled: threading.Event | None = None
    timeout_s: float | None = None
    ahead: Ahead | None = None
    order: Order = "relevance"
    hint: bool = True

    def __post_init__(self) -> None:
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise ConfigError(f"timeout_s is {self.timeout_s}; it must be above 0")
        for name, known in (("order", get_args(Order)), ("on_overflow", get_args(Overflow))):
            if (value := getattr(self, name)) not in known:
                raise ConfigError(f"{name} {value!r} is unknown; choose one of {', '.join(known)}")

    def limit(self, started: float) -> Limit:
        """The limit of a question that was asked at `started`."""
        return Limit.of(self.cancelled, self.timeout_s, started)


class Kept(NamedTuple):
    """A conversation that keeps its context.

    answered: is told this turn's new passages, the answer and its ids, before the answer is given out
    """

    earlier: Earlier
    answered: Callable[[Sequence[Hit], str, Sequence[int]], None]


class Reader:
    """Answers prompts over hits that are already retrieved. Thread-safe."""

    def __init__(
        self,
        lm: LanguageModel,
        encoder: ModelEncoder,
        prompt_format: PromptFormat,
        kv: KVStore,
        documents: DocumentStore,
        prefixes: Prefixes,
        admission: Admission,
        estimate: PrefillEstimate,
        loader: BlockLoader | None = None,
    ) -> None:
        self.lm = lm
        self.encoder = encoder
        self.format = prompt_format
        self.kv = kv
        self.documents = documents
        self.prefixes = prefixes
        self.admission = admission
        self.estimate = estimate
        self.loader = loader
        self._eos = eos_token_ids(lm)
        self._read_counts = ReadCounts()
        self._contexts = Contexts()

    def check(self, method: FusionMethod) -> None:
        """Raises ConfigError when the method cannot read the blocks that this store's encoder makes."""
        if not method.reuses_blocks:
            return
        own = self.encoder
        recipe = block_recipe(self.lm, method, own.recipe)
        prefix_ids = [*self.format.prefix_ids, *method.additions(self.lm).behind_prefix] if recipe.sees_prefix else []
        if recipe != own.recipe or prefix_ids != own.prefix_ids:
            other = f"{own.recipe}" if recipe != own.recipe else "blocks behind another prefix"
            raise ConfigError(
                f"method {method.name!r} needs blocks of recipe {recipe} and the store was opened for {other}; open it "
                f"with method={method.name!r}"
            )

    def question_ends(self, question: str) -> PromptEnds:
        """Raises PromptError (empty question)."""
        return PromptEnds(self.format.prefix_ids, self.format.suffix_ids(self.lm.tokenizer, question))

    def prompt(self, ends: PromptEnds, hits: Sequence[Hit], reading: Reading) -> tuple[Prompt, int]:
        """The prompt over as many hits as fit, and how many were left out.

        Raises PromptError (more passages than the method can read under "error"), ContextTooLongError (too long under
        "error", or without any passage).
        """
        method = reading.method
        room = self.lm.max_positions - len(ends.prefix_ids) - len(ends.suffix_ids)
        if room < 0:
            raise ContextTooLongError(
                f"the question has {len(ends.suffix_ids)} tokens, {len(ends.prefix_ids)} come before it, and "
                f"{self.lm.name} takes {self.lm.max_positions}; ask a shorter one"
            )
        whole = Prompt(ends.prefix_ids, [hit.chunk.token_ids for hit in hits], ends.suffix_ids)
        if hits and reading.on_overflow == "error":
            method.check(self.lm, whole)
        added = method.additions(self.lm)
        kept = _fitting([len(chunk) for chunk in whole.chunk_ids], room, added)
        if kept < len(hits) and reading.on_overflow == "error":
            total = whole.num_tokens + len(added.ids(len(hits)))
            raise ContextTooLongError(
                f"{len(hits)} passages make a prompt of {total} tokens and {self.lm.name} takes "
                f'{self.lm.max_positions}; ask for fewer (k={kept}) or pass on_overflow="trim"'
            )
        return replace(whole, chunk_ids=whole.chunk_ids[:kept]), len(hits) - kept

    def check_keeps(self, reading: Reading) -> None:
        """Raises ConfigError where a conversation's context cannot be kept this way."""
        method = reading.method
        if not method.keeps_context:
            raise ConfigError(
                f"method {method.name!r} cannot keep the context of earlier turns; choose full, reposition or link, or "
                'leave out context="keep"'
            )
        if method.reuses_blocks and self.encoder.recipe.sees_prefix:
            raise ConfigError(
                'context="keep" needs blocks of recipe isolated: those behind a prefix stay behind it; open the store '
                'with recipe="isolated"'
            )
        if reading.evict is not None:
            raise ConfigError('evict and context="keep" exclude each other: one drops what the other keeps')

    def fit(
        self, earlier: Earlier, suffix_ids: Sequence[int], hits: Sequence[Hit], reading: Reading
    ) -> tuple[PromptEnds, Earlier, list[Hit]]:
        """A kept conversation's prompt: everything before this turn's passages as its prefix, and the passages that are
        not in it yet. While prompt and answer do not fit the model, passages of the oldest turn that has any go."""
        added = reading.method.additions(self.lm)
        while True:
            earlier, new = earlier.knowing(hits)
            prefix_ids = reading.method.layout(self.lm, earlier.prompt_parts(), self.encoder.recipe).ids
            passages = sum(hit.chunk.num_tokens for hit in new) + len(added.ids(len(new)))
            total = len(prefix_ids) + passages + len(suffix_ids) + reading.sampling.max_tokens
            fewer = earlier.without_oldest() if total > self.lm.max_positions else None
            if fewer is None:
                return PromptEnds(prefix_ids, suffix_ids), earlier, new
            earlier = fewer

    def stream(
        self, ends: PromptEnds, hits: Sequence[Hit], reading: Reading, clock: Clock, kept: Kept | None = None
    ) -> Iterator[Event]:
        """Wait until there is memory for prompt and answer, then read and answer.

        Raises AnswerTooLargeError, CancelledError, TimedOutError, and what `prompt` raises.
        """
        limit = reading.limit(clock.started)
        if kept is None:  # a conversation's order is what it was, and its later prompts would lack the hint
            ends, hits = self._ordered(ends, hits, reading)
        prompt, dropped = self.prompt(ends, hits, reading)
        tokens = self._most_tokens(prompt, reading)
        waiting = time.perf_counter()
        with self.admission.hold(kv_bytes(self.lm, tokens), tokens, limit):
            clock.queue_s = time.perf_counter() - waiting
            yield from self._answer(_Asked(prompt, hits[: len(hits) - dropped], dropped, reading, clock, limit, kept))

    def _ordered(self, ends: PromptEnds, hits: Sequence[Hit], reading: Reading) -> tuple[PromptEnds, Sequence[Hit]]:
        """Order passages as shares most with the prefix tree, each once, followed by the hint, if order="shared".

        Methods that read blocks ignore the order: a block is reusable at any position.
        """
        if reading.order != "shared" or not reading.method.takes_exact:
            return ends, hits
        once = list({tuple(hit.chunk.token_ids): hit for hit in hits}.values())
        if reading.on_overflow == "trim":
            once = once[: len(once) - self.prompt(ends, once, reading)[1]]
        passages = [tuple(hit.chunk.token_ids) for hit in once]
        known = partial(self.prefixes.count, reading.method)
        order = shared_order(known, self._read_counts, tuple(ends.prefix_ids), passages)
        self._read_counts.count(passages)
        hint = encode_text(self.lm.tokenizer, relevance_hint(order)) if reading.hint else []
        return PromptEnds(ends.prefix_ids, [*hint, *ends.suffix_ids]), [once[rank] for rank in order]

    def _most_tokens(self, prompt: Prompt, reading: Reading) -> int:
        """Tokens of the prompt, of what the method adds, and of the longest answer."""
        added = reading.method.additions(self.lm).ids(len(prompt.chunk_ids)) if prompt.chunk_ids else ()
        read = prompt.num_tokens + len(added)
        return read + self._room(read, reading)

    def _room(self, prompt_tokens: int, reading: Reading) -> int:
        """For the longest answer that there can be."""
        return max(0, min(reading.sampling.max_tokens, self.lm.max_positions - prompt_tokens))

    def _answer(self, asked: _Asked) -> Iterator[Event]:
        read = yield from self._read(asked)
        asked.clock.read(read.loaded, read.fused, read.prefix.encode_s)
        text, made, finish = yield from self._write(asked, read)
        fused, prefix, loaded = read.fused, read.prefix, read.loaded
        created = prefix.created_tokens + loaded.encoded_tokens
        computed = max(fused.computed_tokens) + fused.encoded_tokens + created
        cached = max(0, fused.prompt_tokens - computed)
        usage = Usage(fused.prompt_tokens, cached, len(made), created, computed)
        name = asked.reading.method.name
        yield Done(Answer(text, read.sources, asked.clock.timings(), usage, name, asked.dropped, finish))

    def _read(self, asked: _Asked) -> Generator[Event, None, _Read]:
        """Load what the prompt needs, tell the sources, and run the prompt."""
        prompt, hits, reading, kept = asked.prompt, asked.hits, asked.reading, asked.kept
        method = reading.method
        base = None if (key := asked.context_key) is None else self._contexts.find(key)
        path = self._path(prompt, hits, method, kept)
        with ExitStack() as leases:
            with limited(asked.limit):
                prefix = leases.enter_context(self._exact(asked, path, base))
                exact = prefix.exact
                if path is None or base is not None:
                    loaded = self._load(prompt, hits, reading, exact, base)
                    sources = _sources(hits, loaded)
                else:
                    loaded = self._load_rest(path, reading, exact)
                    again = kept.earlier.again if kept else ()
                    sources = self._sources_along(path, again, loaded, exact.num_tokens if exact else 0)
            yield Sources(sources)
            asked.limit.check()
            with limited(asked.limit):
                fused = self._fuse(asked, loaded, path, exact, base)
        return _Read(sources, loaded, prefix, path, fused)

    def _write(self, asked: _Asked, read: _Read) -> Generator[Event, None, tuple[str, list[int], str]]:
        """The answer's text, its tokens, and why it ended."""
        fused, sampling = read.fused, asked.reading.sampling
        text, made, ran, finish = "", list[int](), -1, "length"
        pieces = TextStream(self.lm.tokenizer, sampling.stop)
        steps = decode(
            self.lm,
            fused.cache,
            fused.next_logits,
            fused.next_position,
            sampling,
            eos_ids=self._eos,
            never=fused.reserved_ids,
            limit=asked.limit,
        )
        try:
            for token in steps:
                asked.clock.first_token()
                made.append(token)
                if piece := pieces.push(token):
                    text += piece
                    yield Token(piece)
                if pieces.stopped:
                    break
            else:
                ran = len(made)  # an answer that its reader ends: whether its last token ran is chance
            finish = "stop" if pieces.stopped or not _ran_out(len(made), sampling, self.lm, fused) else "length"
            if piece := pieces.finish():
                text += piece
                yield Token(piece)
        finally:
            steps.close()
            if read.path is not None and asked.reading.evict is None and _is_reused(read.path, asked.reading.method):
                self.prefixes.keep(asked.reading.method, read.path, made[:ran], fused)
            fused.cache.release()
        if asked.kept is not None:
            asked.kept.answered(asked.hits, text, self._said(text, made, pieces.stopped))
        return text, made, finish

    def _said(self, text: str, made: list[int], stopped: bool) -> list[int]:
        """Ids that the next turn reads as this answer: its tokens, where they are its text and nothing else."""
        specials = control_tokens(self.lm.tokenizer, special_only=True)
        return encode_text(self.lm.tokenizer, text) if stopped or not specials.keys().isdisjoint(made) else made

    def drop_deleted(self) -> None:
        """Let go of what was computed over passages that are gone."""
        self.prefixes.drop_deleted()
        self._contexts.forget()

    def clear(self) -> None:
        """Let go of all exact KV."""
        self.prefixes.clear()

    def _path(self, prompt: Prompt, hits: Sequence[Hit], method: FusionMethod, kept: Kept | None) -> Path | None:
        """The prompt as the prefix tree knows it; None where it is of no use to the method."""
        if kept is None and (method.reuses_blocks or not method.takes_exact):
            return None
        parts, earlier = prompt.parts, list[Hit]()
        if kept is not None:
            parts, earlier = (*kept.earlier.prompt_parts(), *parts[1:]), kept.earlier.hits
        layout = method.layout(self.lm, parts, self.encoder.recipe)
        return Path(parts, layout, [*earlier, *hits], len(hits), self.prefixes.drops)

    @contextmanager
    def _exact(self, asked: _Asked, path: Path | None, base: SharedContext | None) -> Iterator[Prefix]:
        """The KV of the prompt's first tokens: of its prefix for a method that reads blocks; else of what the tree has,
        all but the last token at most, and nothing of the suffix where its rows vote on what is evicted."""
        prompt, reading = asked.prompt, asked.reading
        method = reading.method
        if base is not None or not (method.reuses_blocks or method.takes_exact):
            yield Prefix()
        elif path is None:
            with self.prefixes.text(method.prefix_ids(self.lm, prompt)) as prefix:
                yield prefix
        else:
            most = path.layout.num_tokens - 1 if reading.evict is None else prompt.context_tokens
            with self.prefixes.match(method, path, most) or nullcontext() as lease:
                yield Prefix(lease)

    def _load_rest(self, path: Path, reading: Reading, exact: Exact | None) -> LoadedBlocks:
        """Blocks of the passages that are not known; of none for a method that reads text."""
        known = 0 if exact is None else exact.num_tokens
        chunks = [path.hits[piece.passage].chunk for piece in path.layout.placed(known) if piece.passage is not None]
        if not chunks:
            return LoadedBlocks([], [], [], 0.0, 0.0, 0)
        return load_or_compute(self.encoder, self.kv, self.documents, chunks, loader=self.loader, ahead=reading.ahead)

    def _sources_along(self, path: Path, again: Sequence[Hit], loaded: LoadedBlocks, known: int) -> list[Source]:
        """This turn's passages, and those of them that were read before, with where their KV came from."""
        fresh = iter(zip(loaded.handles, loaded.origins, strict=True))
        sources = []
        for piece, hit in path.passages:
            if path.layout.separate and piece.end > known:
                handle, origin = next(fresh)
            else:
                handle, origin = self.encoder.key(hit.chunk.token_ids), EXACT if piece.end <= known else UNUSED
            sources.append(Source(hit.chunk, hit.score, handle, origin))
        by_ids = {tuple(source.chunk.token_ids): source for source in sources}
        return [
            *sources[len(sources) - path.asked :],
            *(replace(by_ids[tuple(hit.chunk.token_ids)], chunk=hit.chunk, score=hit.score) for hit in again),
        ]

    def _load(
        self,
        prompt: Prompt,
        hits: Sequence[Hit],
        reading: Reading,
        exact: Exact | None,
        base: SharedContext | None,
    ) -> LoadedBlocks:
        method, own = reading.method, self.encoder
        if base is not None or not method.reuses_blocks:
            handles = [own.key(hit.chunk.token_ids) for hit in hits]
            return LoadedBlocks([], handles, [UNUSED if base is None else SHARED] * len(hits), 0.0, 0.0, 0)
        encoder: ModelEncoder = own
        ids = method.prefix_ids(self.lm, prompt)
        if passing := own.recipe.sees_prefix and ids != own.prefix_ids:
            encoder = ModelEncoder(
                self.lm,
                own.recipe,
                ids,
                own.tenant,
                read_prefix=lambda _: nullcontext(exact),
                on_encoded=own.on_encoded,
            )
        chunks = [hit.chunk for hit in hits]
        return load_or_compute(
            encoder, self.kv, self.documents, chunks, passing=passing, loader=self.loader, ahead=reading.ahead
        )

    def _fuse(
        self,
        asked: _Asked,
        loaded: LoadedBlocks,
        path: Path | None,
        exact: Exact | None,
        base: SharedContext | None,
    ) -> Fused:
        """Over the context of another question in progress where there is one; else others may find this one's."""
        key = asked.context_key
        if key is None or base is not None:
            return self._fuse_over(asked, loaded, path, exact, base)
        with self._contexts.making(key, asked.limit) as found:
            if isinstance(found, SharedContext):
                return self._fuse_over(asked, loaded, path, None, found)
            fused = self._fuse_over(asked, loaded, path, exact, None)
            found(fused.share())
            return fused

    def _fuse_over(
        self,
        asked: _Asked,
        loaded: LoadedBlocks,
        path: Path | None,
        exact: Exact | None,
        base: SharedContext | None,
    ) -> Fused:
        started = time.perf_counter()
        prompt, reading = asked.prompt, asked.reading
        fused = fuse(
            self.lm,
            prompt if path is None or not path.layout.separate else path.parts,
            reading.method,
            loaded.blocks,
            recipe=self.encoder.recipe if reading.method.reuses_blocks else None,
            reserve_tokens=self._room(prompt.num_tokens, reading),
            evict=reading.evict,
            exact=exact,
            base=base,
        )
        if not reading.method.reuses_blocks and min(fused.computed_tokens) == fused.prompt_tokens:
            self.lm.finish()  # nothing of the prompt was known: the estimate of a full prefill learns from it
            self.estimate.add(fused.prompt_tokens, time.perf_counter() - started)
        return fused


@dataclass(frozen=True)
class _Asked:
    """One question that is being answered, and what of its passages had to be left out."""

    prompt: Prompt
    hits: Sequence[Hit]
    dropped: int
    reading: Reading
    clock: Clock
    limit: Limit
    kept: Kept | None

    @cached_property
    def context_key(self) -> Hashable | None:
        """Key of everything before the suffix; None where other questions cannot share it."""
        prompt, reading = self.prompt, self.reading
        if self.kept is not None or reading.evict is not None or not reading.method.shares_context:
            return None
        if not prompt.prefix_ids and not prompt.chunk_ids:
            return None
        return repr(reading.method), tuple(prompt.prefix_ids), tuple(map(tuple, prompt.chunk_ids))


@dataclass(frozen=True)
class _Read:
    """A prompt that has run, and where its KV came from."""

    sources: list[Source]
    loaded: LoadedBlocks
    prefix: Prefix
    path: Path | None
    fused: Fused


@dataclass
class Clock:
    """Collects the phases of one question."""

    started: float
    retrieve_s: float = 0.0
    queue_s: float = 0.0
    _ttft_s: float | None = None
    _phases: dict[str, float] = field(default_factory=dict)

    def read(self, loaded: LoadedBlocks, fused: Fused, prefix_s: float) -> None:
        times = fused.timings
        self._phases = {
            "load_s": loaded.load_s,
            "encode_s": prefix_s + loaded.encode_s + times.encode_s,
            "place_s": times.place_s,
            "prefill_s": times.prefill_s,
        }

    def first_token(self) -> None:
        if self._ttft_s is None:
            self._ttft_s = time.perf_counter() - self.started

    def timings(self) -> Timings:
        total_s = time.perf_counter() - self.started
        ttft_s = total_s if self._ttft_s is None else self._ttft_s
        phases = {"queue_s": self.queue_s, "retrieve_s": self.retrieve_s, **self._phases}
        return Timings(**phases, ttft_s=ttft_s, total_s=total_s)


def _is_reused(path: Path, method: FusionMethod) -> bool:
    return path.layout.separate or method.takes_exact


def _sources(hits: Sequence[Hit], loaded: LoadedBlocks) -> list[Source]:
    rows = zip(hits, loaded.handles, loaded.origins, strict=True)
    return [Source(hit.chunk, hit.score, handle, origin) for hit, handle, origin in rows]


def _fitting(lengths: Sequence[int], room: int, added: Additions) -> int:
    """How many of the best passages fit, whole, with what the method adds to them."""
    count = len(lengths) if added.max_chunks is None else min(len(lengths), added.max_chunks)
    while count and sum(lengths[:count]) + len(added.ids(count)) > room:
        count -= 1
    return count


def _ran_out(tokens: int, sampling: Sampling, lm: LanguageModel, fused: Fused) -> bool:
    return tokens >= min(sampling.max_tokens, lm.max_positions - fused.next_position)
