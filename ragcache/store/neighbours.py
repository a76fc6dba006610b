"""The neighbours of each chunk: chunks that precede it when its KV is computed, as the document store records them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self, TypeVar

from sqlalchemy import Connection, delete, func, insert, select, update

from ragcache.store.database import Database
from ragcache.store.orphans import rescue, to_garbage
from ragcache.store.rows import parts_of
from ragcache.store.schema import advance, chunks, counters, neighbours

_T = TypeVar("_T")

COMPARED = "neighbours_compared"  # name of the counter that `NeighbourTable.compared` returns
NEIGHBOURS = "neighbours"
"""The store's property that holds a `NeighbourChoice`."""
SIMILARITY, DOCUMENT = "similarity", "document"
"""Ways to choose a chunk's neighbours: the most similar embeddings, or the chunks before it in its document."""


class NeighbourChoice(NamedTuple):
    """How many neighbours each chunk has, and how they are chosen: SIMILARITY or DOCUMENT."""

    number: int = 0
    chosen_from: str = SIMILARITY

    def in_order(self, near: Sequence[_T]) -> Sequence[_T]:
        """Return neighbours, given nearest first, in reading order: reversed if they come from the document, else
        unchanged."""
        return near[::-1] if self.chosen_from == DOCUMENT else near

    @classmethod
    def of(cls, bound: object) -> Self:
        """Read the property as stored: a list, or in older stores, which chose by similarity alone, a number."""
        return cls(*bound) if isinstance(bound, list) else cls(int(str(bound or 0)))

    def __str__(self) -> str:
        return f"neighbours={self.number}, neighbours_from={self.chosen_from!r}"

    def bound(self) -> object:
        return self.number if self.chosen_from == SIMILARITY else [*self]


class Near(NamedTuple):
    """A chunk near another: its vector id, and the inner product of their embeddings (0: not computed)."""

    vector_id: int
    score: float = 0.0


class KnownNeighbours(NamedTuple):
    """How many neighbours of a chunk are recorded, and the lowest of their scores."""

    number: int
    lowest: float


@dataclass(eq=False, repr=False)
class NeighbourTable:
    """The recorded neighbours of chunks, by vector id. If a chunk has none recorded, they have yet to be found.

    Every change is one transaction, and waits for other writers as in `DocumentStore`. When a document is deleted or
    replaced, `discard_chunks` deletes the rows that name its chunks.
    """

    _db: Database

    def of(self, vector_ids: Iterable[int]) -> dict[int, list[int]]:
        """Return the recorded neighbours of these chunks, nearest first; chunks without any are left out."""
        unique_ids, found = list(dict.fromkeys(vector_ids)), dict[int, list[int]]()
        own, other = neighbours.c.vector_id, neighbours.c.neighbour
        with self._db.read() as connection:
            for part in parts_of(unique_ids):
                query = select(own, other).where(own.in_(part))
                for id, neighbour in connection.execute(query.order_by(own, neighbours.c.place)):
                    found.setdefault(id, []).append(neighbour)
        return found

    def known(self) -> dict[int, KnownNeighbours]:
        """Return the number and lowest score of every chunk's recorded neighbours."""
        own = neighbours.c.vector_id
        query = select(own, func.count(), func.min(neighbours.c.score)).group_by(own)
        with self._db.read() as connection:
            return {id: KnownNeighbours(number, lowest) for id, number, lowest in connection.execute(query)}

    def record(self, found: Mapping[int, Sequence[Near]]) -> set[int]:
        """Record chunks' neighbours, nearest first, in one transaction. The KV of a chunk whose neighbours changed
        becomes garbage.

        Returns the ids of the chunks that exist together with all of their neighbours; nothing changes for the others.
        Raises StoreReadOnlyError, StoreBusyError, StoreFullError.
        """
        with self._db.write() as connection:
            advance(connection, "generation", 0)
            recorded = {id for id, near in found.items() if _record(connection, id, near)}
            rescue(connection)
        return recorded

    def without_kv(self) -> list[int]:
        """Return the vector ids of the chunks without KV, in the order in which they were stored."""
        query = select(chunks.c.vector_id).where(chunks.c.handle.is_(None))
        with self._db.read() as connection:
            return list(connection.scalars(query.order_by(chunks.c.vector_id)))

    def compared(self) -> int:
        """Return the highest vector id of the chunks that recorded neighbours were chosen among; 0: none."""
        with self._db.read() as connection:
            value = connection.scalar(select(counters.c.value).where(counters.c.name == COMPARED))
        return int(value or 0)

    def set_compared(self, vector_id: int) -> None:
        values = {"name": COMPARED, "value": vector_id}
        with self._db.write() as connection:
            advance(connection, "generation", 0)
            if not connection.execute(update(counters).where(counters.c.name == COMPARED).values(values)).rowcount:
                connection.execute(insert(counters), values)


def _record(connection: Connection, vector_id: int, found: Sequence[Near]) -> bool:
    own, ids = neighbours.c.vector_id == vector_id, [neighbour.vector_id for neighbour in found]
    there = select(func.count()).select_from(chunks).where(chunks.c.vector_id.in_([vector_id, *ids]))
    if connection.scalar(there) != len({vector_id, *ids}):
        return False
    before = connection.scalars(select(neighbours.c.neighbour).where(own).order_by(neighbours.c.place))
    if list(before) == ids:
        return True
    to_garbage(connection, chunks.c.vector_id == vector_id)
    connection.execute(update(chunks).where(chunks.c.vector_id == vector_id).values(handle=None))
    connection.execute(delete(neighbours).where(own))
    rows = [
        {"vector_id": vector_id, "place": n, "neighbour": id, "score": score} for n, (id, score) in enumerate(found)
    ]
    if rows:
        connection.execute(insert(neighbours), rows)
    return True
