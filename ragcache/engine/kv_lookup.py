"""The KV that is at hand for a prompt, and what has to be loaded or computed before it is read."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ragcache.engine.answer import Source
from ragcache.engine.block_writer import COMPUTED, BlockWriter, LoadedBlocks, encode_chunks
from ragcache.engine.loader import BlockLoader
from ragcache.engine.prefixes import Path, Prefixes, PrefixKV, WholeStore
from ragcache.engine.request import Request
from ragcache.fusion.fuse import Fused
from ragcache.fusion.method import FusionMethod
from ragcache.ingest.encoder import ModelEncoder
from ragcache.kv.block import KVBlock, part_of_block
from ragcache.kv.buffers import SharedContext
from ragcache.kv.prefix_cache import PrefixMatch
from ragcache.models.batches import plan_batches
from ragcache.models.language_model import LanguageModel
from ragcache.store.documents import DocumentStore
from ragcache.store.kv_store import KVStore
from ragcache.store.records import Chunk

if TYPE_CHECKING:
    from ragcache.engine.loader import BlockLoader, Prefetch


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


class KVLookup:
    """Brings what prompts are read from. Thread-safe."""

    def __init__(
        self,
        lm: LanguageModel,
        encoder: ModelEncoder,
        kv: KVStore,
        documents: DocumentStore,
        prefixes: Prefixes,
        whole: WholeStore,
        loader: BlockLoader | None,
    ) -> None:
        self.lm = lm
        self.encoder = encoder
        self._kv = kv
        self._documents = documents
        self._prefixes = prefixes
        self._whole = whole
        self._loader = loader

    @contextmanager
    def ready(self, asked: Request, base: SharedContext | None) -> Iterator[ResolvedKV]:
        """Everything that the prompt is read from, which stays until the block ends. base: as in `ResolvedKV`

        Raises CancelledError and TimedOutError within `limits.limited`.
        """
        path = self._path(asked)
        with self._prefix(asked, path, base) as prefix:
            if base is not None or not (path or asked.reading.method.reuses_blocks):
                loaded = self._nothing(asked, UNUSED if base is None else SHARED)
                sources = _sources(asked, loaded)
            elif path is None:
                loaded = self._blocks(asked, prefix)
                sources = _sources(asked, loaded)
            else:
                known = 0 if prefix.exact is None else prefix.exact.num_tokens
                loaded = self._rest(asked, path, known)
                sources = self._along(asked, path, loaded, known, COMPUTED if prefix.created_tokens else EXACT)
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
            with self._prefixes.match(method, path, most) or nullcontext() as lease:
                yield self._before(asked, lease)

    def _before(self, asked: Request, known: PrefixMatch | None) -> PrefixKV:
        """What the tree has; of a store that is read whole, everything before the question."""
        count, generation = asked.prompt.context_tokens, asked.reading.whole
        if generation is None or (known.num_tokens if known else 0) >= count:
            return PrefixKV(known)
        return self._whole.read(asked.prompt.ids[:count], generation)

    def _nothing(self, asked: Request, origin: str) -> LoadedBlocks:
        handles = self.encoder.keys([hit.chunk for hit in asked.hits])
        return LoadedBlocks([], handles, [origin] * len(handles), 0.0, 0.0, 0)

    def _blocks(self, asked: Request, prefix: PrefixKV) -> LoadedBlocks:
        """Blocks of all passages."""
        own, chunks = self.encoder, [hit.chunk for hit in asked.hits]
        ids = asked.reading.method.prefix_ids(self.lm, asked.prompt)
        if not own.recipe.sees_prefix or ids == own.prefix_ids:
            return self._load(asked, chunks)
        encoder = ModelEncoder(
            self.lm,
            own.recipe,
            ids,
            own.tenant,
            read_prefix=lambda _: nullcontext(prefix.exact),
            on_encoded=own.on_encoded,
            neighbourhood=own.neighbourhood,
        )
        return self._load(asked, chunks, encoder)

    def _rest(self, asked: Request, path: Path, known: int) -> LoadedBlocks:
        """Blocks of the passages that are not known; of none for a method that reads text."""
        chunks = [path.hits[piece.passage].chunk for piece in path.layout.placed(known) if piece.passage is not None]
        return self._load(asked, chunks) if chunks else LoadedBlocks([], [], [], 0.0, 0.0, 0)

    def _load(self, asked: Request, chunks: Sequence[Chunk], passing: ModelEncoder | None = None) -> LoadedBlocks:
        """passing: encodes behind a prefix that is not the store's own"""
        return load_or_compute(
            passing or self.encoder,
            self._kv,
            self._documents,
            chunks,
            passing=passing is not None,
            loader=self._loader,
            ahead=asked.reading.ahead,
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


def _sources(asked: Request, loaded: LoadedBlocks) -> list[Source]:
    rows = zip(asked.hits, loaded.handles, loaded.origins, strict=True)
    return [Source(hit.chunk, hit.score, handle, origin) for hit, handle, origin in rows]


# The blocks of a question's passages: each loaded, or computed and kept.


def load_or_compute(
    encoder: ModelEncoder,
    kv_store: KVStore,
    documents: DocumentStore,
    chunks: Sequence[Chunk],
    *,
    passing: bool = False,
    loader: BlockLoader | None = None,
    ahead: Prefetch | None = None,
) -> LoadedBlocks:
    """Load or compute one block a chunk. What no tier holds is computed from the chunk's ids and kept.

    passing: see Keeper
    loader:  chooses for each block between loading and computing; None loads all that some tier has
    ahead:   reads that the loader began while retrieval still ranked

    The name of a block follows from what it depends on, so a block made under another model, recipe or prefix is not
    found here, however it is named in the document store (law 8).

    Raises CancelledError and TimedOutError within `limits.limited`.
    """
    keeper = BlockWriter(kv_store, documents, encoder, passing=passing)
    whole = encoder.with_neighbours([chunk.whole for chunk in chunks])
    handles = [encoder.key(chunk.token_ids, chunk.neighbours) for chunk in whole]
    if loader is not None:
        loaded = loader.load(encoder, keeper, whole, handles, ahead)
    else:
        loaded = _load_all(encoder, keeper, kv_store, whole, handles)
    pairs = zip(chunks, loaded.blocks, strict=True)
    return replace(loaded, blocks=[_part(chunk, block) for chunk, block in pairs])


def _part(chunk: Chunk, block: KVBlock) -> KVBlock:
    """The KV of the chunk's tokens, from that of the whole passage."""
    if chunk.cut_from is None:
        return block
    start = chunk.cut_from[1]
    return part_of_block(block, start, start + chunk.num_tokens)


def _load_all(
    encoder: ModelEncoder, keeper: BlockWriter, kv_store: KVStore, chunks: Sequence[Chunk], handles: Sequence[str]
) -> LoadedBlocks:
    started = time.perf_counter()
    found = kv_store.get_many(handles)
    loaded_at = time.perf_counter()
    missing = {handle: chunks[rank] for rank, handle in enumerate(handles) if found[rank] is None}
    computed: dict[str, KVBlock] = {}
    names = list(missing)
    for batch in plan_batches([len(chunk.token_ids) for chunk in missing.values()], encoder.batch_tokens):
        members = [names[rank] for rank in batch]
        made = encode_chunks(encoder, [missing[handle] for handle in members])
        for handle, block in zip(members, made, strict=True):
            computed[handle] = keeper.keep(missing[handle], handle, block)
    return LoadedBlocks(
        blocks=[computed[handle] if hit is None else hit.block for handle, hit in zip(handles, found, strict=True)],
        handles=list(handles),
        origins=[COMPUTED if hit is None else hit.tier for hit in found],
        load_s=loaded_at - started,
        encode_s=time.perf_counter() - loaded_at,
        encoded_tokens=sum(block.num_tokens for block in computed.values()),
    )
