"""Finds the KV that is available for a prompt, and loads or computes the rest before the prompt is read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace

import numpy as np

from ragcache.engine.answer import Source
from ragcache.engine.caches.prefix_nodes import common_length
from ragcache.engine.caches.prefixes import Path, Prefixes, PrefixKV
from ragcache.engine.loader import COMPUTED, BlockLoader, LoadedBlocks
from ragcache.engine.output import sources_of
from ragcache.engine.request import Request
from ragcache.fusion.fuse import FuseOutput
from ragcache.fusion.method import FusionMethod
from ragcache.ingest.encoder import ModelEncoder, OnEncoded
from ragcache.kv.buffers import SharedContext
from ragcache.models.language_model import LanguageModel
from ragcache.store.documents import DocumentStore
from ragcache.store.records import Chunk

UNUSED = "unused"
EXACT = "exact"
SHARED = "shared"


@dataclass(frozen=True)
class ResolvedKV:
    """The KV that a prompt is read from.

    path:    the prompt as the prefix tree knows it; None if its KV is not looked up in the tree
    prefix:  exact KV of the prompt's first tokens
    loaded:  blocks of its passages
    sources: its passages, with the origin of their KV
    """

    path: Path | None
    prefix: PrefixKV
    loaded: LoadedBlocks
    sources: list[Source]


@dataclass(eq=False, repr=False)
class KVLookup:
    """Provides the KV that prompts are read from. Thread-safe."""

    lm: LanguageModel
    encoder: ModelEncoder
    _documents: DocumentStore
    _prefixes: Prefixes
    _loader: BlockLoader

    @contextmanager
    def resolve(self, request: Request, base: SharedContext | None) -> Iterator[ResolvedKV]:
        """Yield all KV that the prompt is read from; it stays in memory until the with block ends.

        base: the context of everything before the suffix, if another question has placed it

        Raises CancelledError and TimedOutError within `deadline.limited`, and StoreError.
        """
        path, loaded, encoder = self._path(request), LoadedBlocks(), self._encoder_for(request)
        with self._prefix(request, path, base) as prefix:
            known, chunks = 0 if prefix.exact is None else prefix.exact.num_tokens, list[Chunk]()
            if path is not None and base is None:
                placed = path.layout.placed(known)
                chunks = [path.hits[piece.passage].chunk for piece in placed if piece.passage is not None]
            elif request.options.method.reuses_blocks and base is None:
                chunks = [hit.chunk for hit in request.hits]
                ids = request.options.method.prefix_ids(self.lm, request.prompt)
                encoder = encoder.after(ids, lambda _: nullcontext(prefix.exact))
            if chunks:
                passing, ahead = encoder is not self.encoder, request.options.ahead
                loaded = self._loader.load(encoder, self._documents, chunks, passing=passing, ahead=ahead)
            if path is not None and base is None:
                known_as = COMPUTED if prefix.created_tokens else EXACT
                handles, origins = _along(encoder, path, loaded, known, known_as)
            else:
                handles = loaded.handles or encoder.keys([hit.chunk for hit in request.hits])
                origins = loaded.origins or [UNUSED if base is None else SHARED] * len(request.hits)
            yield ResolvedKV(path, prefix, loaded, sources_of(request, handles, origins))

    def keep(self, request: Request, resolved: ResolvedKV, answer_ids: Sequence[int], fused: FuseOutput) -> None:
        """Keep the KV of the prompt and its answer, if the prefix tree can hold it."""
        path, options = resolved.path, request.options
        method = options.method
        if path is None or not self.keeps_context_of(method):
            return
        if method.reuses_blocks or method.takes_exact:
            self._prefixes.keep(method, path, answer_ids, fused)

    def pin(self, request: Request, path: Path | None) -> int:
        """Keep the KV up to the prompt's cache points from eviction; return how many of its first tokens are kept."""
        prompt, pinned = request.prompt, [0]
        for head_ids, ttl_s in request.options.pins:
            count = common_length(np.asarray(prompt.ids), np.asarray(head_ids))
            if path is None:
                pinned.append(self._prefixes.pin(None, prompt.prefix_ids[:count], ttl_s))
            else:
                pinned.append(self._prefixes.pin(request.options.method, path.elements[:count], ttl_s))
        return max(pinned)

    def keeps_context_of(self, method: FusionMethod) -> bool:
        """Return whether KV that the method has placed can be shared with other questions and kept for later ones.

        It cannot if each head of a block holds different tokens; every question then places its own context.
        """
        return self.encoder.recipe.is_dense or not method.reuses_blocks

    def shares_context_of(self, method: FusionMethod) -> bool:
        """Return whether questions over the same passages can share a context.

        With recurrent layers, they can share a context of blocks alone: a method that runs all tokens leaves no states
        at the end of the passages, where the suffix would begin.
        """
        return self.keeps_context_of(method) and (method.reuses_blocks or not self.lm.is_recurrent)

    def _path(self, request: Request) -> Path | None:
        method, earlier_turns = request.options.method, request.earlier_turns
        goes_on = request.options.found if method.reuses_blocks else method.takes_exact
        if earlier_turns is None and not goes_on:
            return None
        salt = request.filter_salt if self.encoder.recipe.neighbours else ""
        seen = self._prefixes.generation.seen
        return Path(request.plan.parts, request.plan.layout, request.all_hits, seen, salt)

    def _prefix(
        self, request: Request, path: Path | None, base: SharedContext | None
    ) -> AbstractContextManager[PrefixKV]:
        """Return the KV of the prompt's prefix for a method that reads blocks, else of all known first tokens."""
        method = request.options.method
        if base is not None or not (method.reuses_blocks or method.takes_exact):
            return nullcontext(PrefixKV())
        if path is None:
            return self._prefixes.text(method.prefix_ids(self.lm, request.prompt))
        return self._known(request, path)

    @contextmanager
    def _known(self, request: Request, path: Path) -> Iterator[PrefixKV]:
        """Yield the KV that the prefix tree holds for the prompt, of all tokens but the last.

        If passages were found in the prompt's text, and the tree holds no more than the prompt's prefix, the KV of the
        prefix is yielded, which is computed if necessary.
        """
        prompt, options = request.prompt, request.options
        with self._prefixes.match(options.method, path, path.layout.num_tokens - 1) as (lease, load_s):
            count = 0 if lease is None else lease.num_tokens
            if options.found and count <= len(prompt.prefix_ids):
                with self._prefixes.text(prompt.prefix_ids) as prefix:
                    yield prefix
            else:
                yield PrefixKV(lease, load_s=load_s)

    def of(self, salt: str, prefixes: Prefixes, on_encoded: OnEncoded) -> KVLookup:
        """Return a lookup for another salt, over the same model, documents and loader.

        prefixes: those of that salt; on_encoded: called after every batch of blocks, see `ModelEncoder`
        """
        encoder = replace(self.encoder, salt=salt, read_prefix=prefixes.exact, on_encoded=on_encoded)
        return replace(self, encoder=encoder, _prefixes=prefixes)

    def _encoder_for(self, request: Request) -> ModelEncoder:
        """Return the store's encoder, or an encoder that leaves out neighbours which the question's filter hides."""
        return self.encoder.passing(request.options.where)


def _along(
    encoder: ModelEncoder, path: Path, loaded: LoadedBlocks, known: int, known_as: str
) -> tuple[Sequence[str], Sequence[str]]:
    """Return the handle and the origin of the KV of each passage of the path.

    loaded: blocks of the passages after the first `known` tokens
    known_as: origin of passages within the first `known` tokens, whose KV was exact
    """
    handles = encoder.keys([hit.chunk for hit in path.hits])
    origins = [known_as if piece.end <= known else UNUSED for piece in path.layout.passages]
    placed = [piece.passage for piece in path.layout.placed(known) if piece.passage is not None]
    for rank, handle, origin in zip(placed, loaded.handles, loaded.origins, strict=True):
        handles[rank], origins[rank] = handle, origin
    return handles, origins
