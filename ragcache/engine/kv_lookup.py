"""The KV that is at hand for a prompt, and what has to be loaded or computed before it is read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

from ragcache.engine.answer import Source
from ragcache.engine.loader import COMPUTED, BlockLoader, LoadedBlocks
from ragcache.engine.prefixes import Path, Prefixes, PrefixKV, WholeStore
from ragcache.engine.request import Request
from ragcache.fusion.fuse import Fused
from ragcache.fusion.method import FusionMethod
from ragcache.ingest.encoder import ModelEncoder
from ragcache.kv.buffers import SharedContext
from ragcache.kv.prefix_cache import PrefixMatch
from ragcache.models.language_model import LanguageModel
from ragcache.store.documents import DocumentStore
from ragcache.store.records import Chunk

UNUSED = "unused"
EXACT = "exact"
SHARED = "shared"


@dataclass(frozen=True)
class ResolvedKV:
    """What a prompt is read from.

    path:    the prompt as the prefix tree knows it; None where it is of no use to the method
    prefix:  exact KV of its first tokens
    base:    all that stands before its suffix, as another question placed it
    loaded:  its passages' blocks
    sources: its passages, with where their KV came from
    """

    path: Path | None
    prefix: PrefixKV
    base: SharedContext | None
    loaded: LoadedBlocks
    sources: list[Source]


@dataclass(eq=False, repr=False)
class KVLookup:
    """Brings what prompts are read from. Thread-safe."""

    lm: LanguageModel
    encoder: ModelEncoder
    _documents: DocumentStore
    _prefixes: Prefixes
    _whole: WholeStore
    _loader: BlockLoader

    @contextmanager
    def resolve(self, asked: Request, base: SharedContext | None) -> Iterator[ResolvedKV]:
        """Everything that the prompt is read from, which stays until the block ends. base: as in `ResolvedKV`

        Raises CancelledError and TimedOutError within `limits.limited`.
        """
        path, loaded, encoder = self._path(asked), LoadedBlocks(), self.encoder
        with self._prefix(asked, path, base) as prefix:
            known, chunks = 0 if prefix.exact is None else prefix.exact.num_tokens, list[Chunk]()
            if path is not None and base is None:
                placed = path.layout.placed(known)
                chunks = [path.hits[piece.passage].chunk for piece in placed if piece.passage is not None]
            elif asked.reading.method.reuses_blocks and base is None:
                chunks = [hit.chunk for hit in asked.hits]
                encoder = self._encoder_behind(asked.reading.method.prefix_ids(self.lm, asked.prompt), prefix)
            if chunks:
                passing, ahead = encoder is not self.encoder, asked.reading.ahead
                loaded = self._loader.load(encoder, self._documents, chunks, passing=passing, ahead=ahead)
            if path is not None and base is None:
                sources = self._along(asked, path, loaded, known, COMPUTED if prefix.created_tokens else EXACT)
            else:
                origins = loaded.origins or [UNUSED if base is None else SHARED] * len(asked.hits)
                keys = loaded.handles or encoder.keys([hit.chunk for hit in asked.hits])
                rows = zip(asked.hits, keys, origins, strict=True)
                sources = [Source(hit.chunk, hit.score, handle, origin) for hit, handle, origin in rows]
            yield ResolvedKV(path, prefix, base, loaded, sources)

    def keep(self, asked: Request, ready: ResolvedKV, answer_ids: Sequence[int], fused: Fused) -> None:
        """Remember the KV of the prompt and its answer, where the prefix tree can hold it."""
        path, reading = ready.path, asked.reading
        method = reading.method
        if path is None or reading.evict is not None or not self.keeps_context_of(method):
            return
        if method.reuses_blocks or method.takes_exact:
            self._prefixes.keep(method, path, answer_ids, fused)

    def keeps_context_of(self, method: FusionMethod) -> bool:
        """Whether what the method places can be shared and kept: where blocks hold other tokens in each head, every
        question places its own."""
        return self.encoder.recipe.keeps_all or not method.reuses_blocks

    def shares_context_of(self, method: FusionMethod) -> bool:
        """Whether questions over the same passages can stand on one context: a state is kept where blocks end alone."""
        return self.keeps_context_of(method) and (method.reuses_blocks or not self.lm.is_recurrent)

    def is_of_store(self, asked: Request) -> bool:
        """Whether nothing stands before the question but the store's own prefix and passages that are still stored."""
        own = tuple(asked.reading.method.prefix_ids(self.lm, asked.prompt)) == self.encoder.first_ids
        ids = {hit.chunk.vector_id for hit in asked.hits}
        return own and asked.kept is None and len(self._documents.chunks_by_vector_ids(ids)) == len(ids)

    def _path(self, asked: Request) -> Path | None:
        method, kept = asked.reading.method, asked.kept
        if kept is None and (method.reuses_blocks or not method.takes_exact):
            return None
        parts = asked.prompt.parts
        if kept is not None:
            parts = (*kept.earlier.prompt_parts(), *parts[1:])
        layout = method.layout(self.lm, parts, self.encoder.recipe)
        hits = [*(kept.earlier.hits if kept else ()), *asked.hits]
        return Path(parts, layout, hits, len(asked.hits), self._prefixes.drops)

    @contextmanager
    def _prefix(self, asked: Request, path: Path | None, base: SharedContext | None) -> Iterator[PrefixKV]:
        """The KV of the prompt's first tokens: of its prefix for a method that reads blocks; else of what the tree has,
        all but the last token at most, and nothing of the suffix where its rows vote on what is evicted."""
        prompt, reading = asked.prompt, asked.reading
        method = reading.method
        if base is not None or not (method.reuses_blocks or method.takes_exact):
            yield PrefixKV()
        elif path is None:
            with self._prefixes.text(method.prefix_ids(self.lm, prompt)) as prefix:
                yield prefix
        else:
            most = path.layout.num_tokens - 1 if reading.evict is None else prompt.context_tokens
            with self._prefixes.match(method, path, most) as (lease, load_s):
                prefix = self._before(asked, lease)
                yield prefix._replace(load_s=prefix.load_s + load_s)

    def _before(self, asked: Request, known: PrefixMatch | None) -> PrefixKV:
        """What the tree has; of a store that is read whole, everything before the question."""
        count, generation = asked.prompt.context_tokens, asked.reading.whole
        if generation is None or (known.num_tokens if known else 0) >= count:
            return PrefixKV(known)
        return self._whole.read(asked.prompt.ids[:count], generation)

    def _encoder_behind(self, ids: list[int], prefix: PrefixKV) -> ModelEncoder:
        """The store's own, or one that encodes behind another prefix where blocks depend on that."""
        own = self.encoder
        if not own.recipe.sees_prefix or ids == own.prefix_ids:
            return own
        return ModelEncoder(
            self.lm,
            own.recipe,
            ids,
            own.tenant,
            read_prefix=lambda _: nullcontext(prefix.exact),
            on_encoded=own.on_encoded,
            neighbourhood=own.neighbourhood,
        )

    def _along(self, asked: Request, path: Path, loaded: LoadedBlocks, known: int, known_as: str) -> list[Source]:
        """This turn's passages, and those of them that were read before, with where their KV came from."""
        fresh = iter(zip(loaded.handles, loaded.origins, strict=True))
        keys = self.encoder.keys([hit.chunk for _, hit in path.passages])
        sources = []
        for (piece, hit), key in zip(path.passages, keys, strict=True):
            if path.layout.separate and piece.end > known:
                handle, origin = next(fresh)
            else:
                handle, origin = key, known_as if piece.end <= known else UNUSED
            sources.append(Source(hit.chunk, hit.score, handle, origin))
        by_ids = {tuple(source.chunk.token_ids): source for source in sources}
        again = asked.kept.earlier.again if asked.kept else ()
        return [
            *sources[len(sources) - path.asked :],
            *(replace(by_ids[tuple(hit.chunk.token_ids)], chunk=hit.chunk, score=hit.score) for hit in again),
        ]
