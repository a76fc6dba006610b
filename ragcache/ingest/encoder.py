"""The language model as ingestion uses it: chunk ids in, KV blocks and their keys out."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Self

from ragcache.codecs import Codec, RawCodec
from ragcache.errors import ConfigError
from ragcache.kv.block import KVBlock
from ragcache.kv.block_key import Neighbours, Recipe, block_key
from ragcache.kv.exact import Exact
from ragcache.models.block_model import BlockModel
from ragcache.models.card import ModelCard
from ragcache.models.deadline import LIMIT
from ragcache.models.encode import AbandonedSignal
from ragcache.models.kvzip import check_replay
from ragcache.store.filters import Filter
from ragcache.store.records import Chunk

if TYPE_CHECKING:  # FAISS comes with it
    from ragcache.ingest.context_chunks import Neighbourhood

# Returns a context that lends the KV of the given token ids.
ReadPrefix = Callable[[Sequence[int]], AbstractContextManager[Exact | None]]
# A beginning of prompts with fewer tokens is not stored: the question's forward pass computes it in the same time.
LEAST_FIRST_TOKENS = 64
OnEncoded = Callable[[int, float, int], None]  # tokens of the longest chunk, seconds, chunks


@dataclass(eq=False, repr=False)
class BlockKeys:
    """The keys of a model's blocks under a given recipe, prefix and salt.

    first_ids:  token ids that the store's prompts begin with
    salt:       goes into the keys of passages that were not ingested; a stored chunk has the salt of its collection
    neighbourhood: finds the neighbours of each chunk; None if the recipe has no neighbours
    """

    card: ModelCard
    recipe: Recipe = field(default_factory=Recipe)
    first_ids: Sequence[int] = ()
    salt: str = ""
    neighbourhood: Neighbourhood | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        self.first_ids = tuple(self.first_ids)

    @cached_property
    def prefix_ids(self) -> list[int]:
        """Return the prefix of every chunk: `first_ids`, or no ids if the recipe does not attend to them."""
        return list(self.first_ids) if self.recipe.sees_prefix else []

    @cached_property
    def context_ids(self) -> list[int]:
        """Return the ids that the model reads before every chunk: `prefix_ids`, then the recipe's primer."""
        return [*self.prefix_ids, *self.recipe.primer_ids]

    @property
    def first_key(self) -> str | None:
        """Return the block key of the prompts' beginning, or None if it is too short to be stored as a block."""
        if len(self.first_ids) < LEAST_FIRST_TOKENS:
            return None
        return block_key(self.card.fingerprint, Recipe(), (), self.first_ids, self.salt)

    @property
    def owner(self) -> str:
        """Return a key that identifies all blocks of this model, recipe, prefix and salt together."""
        return self.key(())

    @property
    def encoder(self) -> ModelEncoder:
        """Return the encoder that computes these blocks. Raises ConfigError if the model runs in another engine, which
        computes answers only."""
        raise ConfigError(
            "the model runs in another engine, which computes answers alone; add documents with "
            'kv="lazy" here, and run `ragcache ingest`, or open the store without engine=, for their KV'
        )

    def check(self, token_ids: Sequence[int], where: str) -> None:
        """Raise PromptError or ContextTooLongError if the model cannot read this chunk. where: names its document"""
        ids = [*self.context_ids, *self.recipe.marked(token_ids)]
        shared = "prefix and the primer" if self.recipe.primer_ids else "prefix"
        place = f"{where}: a chunk{f' (behind the shared {shared})' if self.context_ids else ''}"
        self.card.check_ids(ids, place)
        check_replay(self.card, self.recipe, self.context_ids, token_ids, place)

    def key(self, token_ids: Sequence[int], neighbours: Neighbours = (), salt: str | None = None) -> str:
        """Return the block key of a chunk. salt: None: `self.salt`"""
        own = self.salt if salt is None else salt
        return block_key(self.card.fingerprint, self.recipe, self.prefix_ids, token_ids, own, neighbours)

    def key_of(self, chunk: Chunk) -> str:
        """Return the block key of a chunk whose neighbours were looked up."""
        return self.key(chunk.token_ids, chunk.neighbours, chunk.salt)

    def keys(self, chunks: Sequence[Chunk]) -> list[str]:
        """Look up the neighbours of chunks, and return the chunks' block keys."""
        return [self.key_of(chunk) for chunk in self.with_neighbours([chunk.whole for chunk in chunks])]

    def passing(self, where: Filter | None) -> Self:
        """Return these keys for a question whose filter hides chunks: hidden chunks are no neighbours."""
        near = self.neighbourhood
        return self if near is None or not where else replace(self, neighbourhood=near.passing(where))

    def with_neighbours(self, chunks: Sequence[Chunk]) -> list[Chunk]:
        """Return the chunks with the token ids of their neighbours, in reading order, as many as the model has room
        for."""
        if self.neighbourhood is None:
            return list(chunks)
        found = zip(chunks, self.neighbourhood.of(chunks), strict=True)
        in_order = self.neighbourhood.choice.in_order
        return [replace(chunk, neighbours=tuple(in_order(self._fitting(chunk, near)))) for chunk, near in found]

    def _fitting(self, chunk: Chunk, near: Sequence[Chunk]) -> tuple[tuple[int, ...], ...]:
        """Return the token ids of neighbours, nearest first, as many as the model has room for."""
        marks = len(self.recipe.marked(()))
        left = self.card.max_positions - len(self.context_ids) - chunk.num_tokens - marks - self.recipe.bos
        taken: list[tuple[int, ...]] = []
        for neighbour in near:
            left -= neighbour.num_tokens + marks
            if left < 0:
                break
            taken.append(tuple(neighbour.token_ids))
        return tuple(taken)


@dataclass(eq=False, repr=False)
class ModelEncoder(BlockKeys):
    """Computes a language model's blocks under a given recipe, prefix and salt.

    Ingestion uses the language model only through this class.

    read_prefix: opens the KV of context_ids at every use; None: the KV is computed at first use and kept
    on_encoded:  called after every batch with its longest chunk's tokens, its seconds and its number of chunks
    codec:       the store's codec, which may add further data to each block (`Codec.beside`)
    """

    card: BlockModel
    read_prefix: ReadPrefix | None = field(default=None, kw_only=True)
    on_encoded: OnEncoded | None = field(default=None, kw_only=True)
    codec: Codec = field(default_factory=RawCodec, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.lm = self.card

    @property
    def encoder(self) -> ModelEncoder:
        return self

    def after(self, ids: Sequence[int], read_prefix: ReadPrefix | None = None) -> ModelEncoder:
        """Return this encoder, or an encoder of plain blocks for the prefix `ids` if blocks depend on their prefix."""
        if not self.recipe.needs_prefix or list(ids) == self.prefix_ids:
            return self
        return replace(self, first_ids=ids, read_prefix=read_prefix, codec=RawCodec())

    @property
    def batch_tokens(self) -> int:
        """Return the number of padded tokens that suits a batch on the model's device."""
        return self.lm.batch_tokens

    def encode(self, chunks: Sequence[Sequence[int]], neighbours: Sequence[Neighbours] | None = None) -> list[KVBlock]:
        """Compute a block for each chunk, in order, in a single batch.

        neighbours: for each chunk, the token ids of its neighbours, which the model reads first; None: no neighbours

        Raises CancelledError and TimedOutError under `deadline.limited`, also within the batch.
        """
        limit = LIMIT.get()
        limit.check()
        behind = [()] * len(chunks) if neighbours is None else neighbours
        rows = [
            [*self.recipe.before(near), *self.recipe.marked(chunk)] for chunk, near in zip(chunks, behind, strict=True)
        ]
        longest = max(map(len, rows), default=1)
        try:
            read_prefix = self.read_prefix or (lambda _ids: nullcontext(self._prefix))
            with read_prefix(self.context_ids) if self.context_ids else nullcontext() as prefix:
                started = time.perf_counter()
                blocks = self.lm.encode(
                    chunks,
                    self.recipe,
                    self.prefix_ids,
                    prefix=prefix,
                    batch_tokens=longest * len(chunks) + len(chunks) + 1,
                    is_needed=limit.allows,
                    neighbours=behind,
                )
                if not self.recipe.is_dense:  # chunks were read twice, or with more tokens
                    return blocks
                if self.on_encoded is not None and chunks:
                    self.lm.finish()
                    self.on_encoded(longest, time.perf_counter() - started, len(chunks))
                return [self.codec.beside(self.lm, *pair, prefix) for pair in zip(rows, blocks, strict=True)]
        except AbandonedSignal:
            limit.check()
            raise

    @cached_property
    def _prefix(self) -> Exact | None:
        return self.lm.read(self.context_ids)
