"""Ids of chunks.

Callers use ids of documents and of chunks interchangeably, so a chunk never has the id of another document. The id of
a document is the caller's; the id of a chunk is derived from it and changes if the two collide.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

import sqlalchemy as sa

from ragcache.store.rows import parts_of
from ragcache.store.schema import chunks, documents


def free_chunk_ids(connection: sa.Connection, collection: str, document_id: str, chunk_ids: Sequence[str]) -> list[str]:
    """Return `chunk_ids` for chunks of a stored document, with a suffix on each that is taken.

    An id is taken if another document or any chunk of the collection has it. A chunk of another document whose id is
    `document_id` is renamed in the same way; its text, vector id and handle stay.
    """
    same = sa.and_(chunks.c.collection == collection, chunks.c.id == document_id)
    owner = connection.scalar(sa.select(chunks.c.document_id).where(same, chunks.c.document_id != document_id))
    if owner is not None:
        name = _free(connection, collection, owner, [document_id])[document_id]
        connection.execute(sa.update(chunks).where(same).values(id=name))
    found = _free(connection, collection, document_id, chunk_ids)
    return [found[id] for id in chunk_ids]


def _free(connection: sa.Connection, collection: str, document_id: str, chunk_ids: Sequence[str]) -> dict[str, str]:
    """Return, for each x in `chunk_ids`, the first of x, x##1, x##2, ... that is free, by x."""
    found: dict[str, str] = {}
    left = {id: id for id in chunk_ids}
    for number in count(1):
        taken: set[str] = set()
        for part in parts_of(list(left.values())):
            others = sa.select(documents.c.id).where(documents.c.id.in_(part), documents.c.id != document_id)
            others = others.where(documents.c.collection == collection)
            named = sa.select(chunks.c.id).where(chunks.c.collection == collection, chunks.c.id.in_(part))
            taken.update(connection.scalars(named.union(others)))
        if number > 1:  # a free name may be the wanted id of another of these chunks
            taken.update(set(chunk_ids) & set(left.values()))
        found |= {id: name for id, name in left.items() if name not in taken}
        left = {id: f"{id}##{number}" for id, name in left.items() if name in taken}
        if not left:
            break
    return found
