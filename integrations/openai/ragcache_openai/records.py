"""Objects that the API keeps in the store's database. Each has an id and belongs to an API key; a file is kept with its
bytes.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, BinaryIO, NamedTuple

from sqlalchemy import (
    JSON,
    BigInteger,
    Column,
    ColumnElement,
    Connection,
    Double,
    ForeignKey,
    Integer,
    LargeBinary,
    MetaData,
    RowMapping,
    Table,
    Text,
    and_,
    delete,
    func,
    insert,
    inspect,
    or_,
    select,
    update,
)
from sqlalchemy.dialects.postgresql import JSONB

from ragcache.errors import ConfigError, NoSuchDocumentError
from ragcache.store.database import Database

PIECE = 1 << 20
AT_ONCE = 500
REMEMBERED = 100_000
"""PIECE: bytes of a file in a row. AT_ONCE: most ids in a statement. REMEMBERED: the id of a deleted object is kept
until so many objects were made after it.
"""

_metadata = MetaData()
_Text = Text().with_variant(Text(collation="C"), "postgresql")

objects = Table(
    "ragcache_openai_objects",
    _metadata,
    # In order of creation, which lists use.
    Column("number", BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=True),
    Column("id", _Text, nullable=False, unique=True),
    Column("kind", _Text, nullable=False),
    Column("owner", _Text, nullable=False, index=True),
    Column("parent", _Text, nullable=False, index=True),  # the vector store of a file in it; ""
    Column("state", _Text, nullable=False, index=True),
    Column("created_at", Double, nullable=False),
    Column("body", JSON().with_variant(JSONB(), "postgresql"), nullable=False),
    Column("text", _Text, nullable=False, default=""),  # unused; tables of earlier stores have it
    sqlite_autoincrement=True,  # a number is never reused, because pages continue from it
)
gone = Table(  # deleted objects: a list that was read up to such an object continues from there
    "ragcache_openai_gone",
    _metadata,
    Column("number", BigInteger, primary_key=True, autoincrement=False),
    Column("id", _Text, nullable=False, index=True),
    Column("owner", _Text, nullable=False),
)
pieces = Table(
    "ragcache_openai_pieces",
    _metadata,
    Column("file", BigInteger, ForeignKey(objects.c.number, ondelete="CASCADE"), primary_key=True, autoincrement=False),
    Column("place", Integer, primary_key=True, autoincrement=False),
    Column("bytes", LargeBinary, nullable=False),
)


class Record(NamedTuple):
    """An object that is kept.

    kind:       such as "file" or "vector_store"
    owner:      identifies the API key that made the object
    body:       its content, as JSON
    parent:     id of the vector store that a file or a batch of files is in; "" for other objects
    state:      of a file in a vector store how far its indexing is, of a file its purpose; "" for other objects
    created_at: Unix seconds; 0: not stored yet
    number:     rises with each new object; 0: not stored yet
    """

    id: str
    kind: str
    owner: str
    body: dict[str, Any]
    parent: str = ""
    state: str = ""
    created_at: float = 0.0
    number: int = 0


class Page(NamedTuple):
    """A part of a list, and whether more objects follow."""

    records: list[Record]
    has_more: bool


class Records:
    """The table of kept objects. Safe to use from several threads and processes.

    The tables are made at the first change, so that a store without kept objects has none.
    """

    def __init__(self, database: Database) -> None:
        self._db = database
        self._made = self._complete = False

    def add(self, records: Sequence[Record], content: BinaryIO | None = None) -> list[Record]:
        """Keep new objects, all or none, and return them in order of creation.

        An object that has the same id as a new object is replaced.

        content: bytes of the file that is the only object in `records`

        Raises NoSuchDocumentError if a parent was deleted meanwhile, StoreReadOnlyError, StoreBusyError,
        StoreFullError.
        """
        now, parents = time.time(), {one.parent for one in records} - {"", *(one.id for one in records)}
        with self._writing() as connection:
            there = set(connection.scalars(select(objects.c.id).where(objects.c.id.in_(parents))))
            if parents - there:
                raise NoSuchDocumentError(f"{min(parents - there)!r} was deleted meanwhile; nothing was added to it")
            _delete(connection, objects.c.id.in_([one.id for one in records]))
            for one in records:
                row = {**one._asdict(), "created_at": one.created_at or now}
                del row["number"]
                connection.execute(insert(objects).values(row))
            if content is not None:
                number = connection.scalar(select(objects.c.number).where(objects.c.id == records[0].id))
                for place, piece in enumerate(iter(lambda: content.read(PIECE), b"")):
                    connection.execute(insert(pieces).values(file=number, place=place, bytes=piece))
        return self.among([one.id for one in records])

    def get(self, kind: str, owner: str, id: str) -> Record | None:
        found = self.among([id])
        return next((one for one in found if (one.kind, one.owner) == (kind, owner)), None)

    def among(self, ids: Sequence[str]) -> list[Record]:
        """Return the objects with these ids that exist, in order of creation."""
        found: list[Record] = []
        for start in range(0, len(ids), AT_ONCE):
            part = [id for id in ids[start : start + AT_ONCE] if "\0" not in id]  # PostgreSQL would refuse NUL
            found += self._select(objects.c.id.in_(part))
        return found

    def of_state(self, kind: str, state: str, limit: int) -> list[Record]:
        """Return the oldest objects in this state, of all owners."""
        return self._select(objects.c.kind == kind, objects.c.state == state, limit=limit)

    def page(
        self,
        kind: str,
        owner: str,
        *,
        parent: str = "",
        limit: int,
        newest_first: bool,
        after: str | None = None,
        state: str | None = None,
        ids: Sequence[str] | None = None,
    ) -> Page:
        """Return at most `limit` of the owner's objects of a kind and parent, in order of creation or newest first.

        after: id of the object after which the page begins; it may have been deleted meanwhile
        state, ids: only objects in this state, and with these ids; None: all

        Raises ConfigError if `after` never existed.
        """
        if "\0" in (state or ""):  # PostgreSQL would refuse NUL
            return Page([], False)
        wanted = [objects.c.kind == kind, objects.c.owner == owner, objects.c.parent == parent]
        wanted += [] if state is None else [objects.c.state == state]
        wanted += [] if ids is None else [objects.c.id.in_(ids)]
        if after:
            bound = self._number(owner, after)
            wanted.append(objects.c.number < bound if newest_first else objects.c.number > bound)
        found = self._select(and_(*wanted), limit=limit + 1, newest_first=newest_first)
        return Page(found[:limit], len(found) > limit)

    def states(self, kind: str, parent: str, ids: Sequence[str] | None = None) -> dict[str, tuple[int, int]]:
        """Return, by state, the number of the objects of a kind below `parent`, and the sum of their bytes."""
        size = func.coalesce(func.sum(objects.c.body["bytes"].as_integer()), 0)
        query = select(objects.c.state, func.count(), size).where(objects.c.kind == kind, objects.c.parent == parent)
        query = query if ids is None else query.where(objects.c.id.in_(ids))
        with self._reading() as connection:
            rows = [] if connection is None else connection.execute(query.group_by(objects.c.state)).all()
            return {state: (count, int(total)) for state, count, total in rows}

    def change(self, id: str, body: Mapping[str, Any] | None = None, state: str | None = None) -> bool:
        """Replace a body or a state. Return whether the object still exists."""
        values = {name: value for name, value in (("body", body), ("state", state)) if value is not None}
        with self._writing() as connection:
            return bool(connection.execute(update(objects).where(objects.c.id == id).values(values)).rowcount)

    def settle(self, known: Record, body: Mapping[str, Any], state: str) -> Record | None:
        """Replace body and state if the object is unchanged. Return the object as it is now, or None if it was
        deleted.
        """
        with self._writing() as connection:
            row = connection.execute(select(objects).where(objects.c.number == known.number)).mappings().one_or_none()
            current = None if row is None else _record(row)
            if current != known:
                return current
            settled = known._replace(body=dict(body), state=state)
            values = {"body": settled.body, "state": state}
            connection.execute(update(objects).where(objects.c.number == known.number).values(values))
            return settled

    def delete(self, ids: Iterable[str]) -> None:
        """Delete objects, and all objects below them."""
        wanted = list(ids)
        with self._writing() as connection:
            for start in range(0, len(wanted), AT_ONCE):
                part = wanted[start : start + AT_ONCE]
                _delete(connection, or_(objects.c.id.in_(part), objects.c.parent.in_(part)))

    def keep_newest(self, kind: str, owner: str, most: int) -> None:
        """Delete the owner's oldest objects of a kind, and keep the newest `most`."""
        mine = and_(objects.c.kind == kind, objects.c.owner == owner)
        last = select(objects.c.number).where(mine).order_by(objects.c.number.desc()).offset(most).limit(1)
        with self._writing() as connection:
            if (number := connection.scalar(last)) is not None:
                _delete(connection, and_(mine, objects.c.number <= number))

    def ending(self, kind: str, owner: str, end: str) -> list[Record]:
        """Return the owner's objects of a kind whose ids end with `end`."""
        mine = and_(objects.c.kind == kind, objects.c.owner == owner)
        return self._select(mine, objects.c.id.endswith(end, autoescape=True))

    def content(self, record: Record) -> Iterator[bytes]:
        """Yield the bytes of a file, piece by piece."""
        for place in range(-(-int(record.body["bytes"]) // PIECE)):
            query = select(pieces.c.bytes).where(pieces.c.file == record.number, pieces.c.place == place)
            with self._reading() as connection:
                piece = None if connection is None else connection.scalar(query)
            if piece is None:  # it was deleted meanwhile
                return
            yield piece

    def _number(self, owner: str, id: str) -> int:
        """Return the number of an object after which a list goes on; the object may have been deleted."""
        if found := [one.number for one in self.among([id]) if one.owner == owner]:
            return found[0]
        with self._reading() as connection:
            if connection is not None and "\0" not in id and inspect(connection).has_table(gone.name):
                query = select(func.max(gone.c.number)).where(gone.c.id == id, gone.c.owner == owner)
                if (number := connection.scalar(query)) is not None:
                    return int(number)
        message = f"there is no object {id!r} to list from; leave 'after' out to begin at the beginning"
        raise ConfigError(message, "after")

    def _select(
        self, *wanted: ColumnElement[bool], limit: int | None = None, newest_first: bool = False
    ) -> list[Record]:
        order = objects.c.number.desc() if newest_first else objects.c.number
        with self._reading() as connection:
            if connection is None:
                return []
            rows = connection.execute(select(objects).where(*wanted).order_by(order).limit(limit)).mappings()
            return [_record(row) for row in rows]

    @contextmanager
    def _reading(self) -> Iterator[Connection | None]:
        """Yield a connection, or None if nothing was ever kept."""
        with self._db.read() as connection:
            self._made = self._made or inspect(connection).has_table(objects.name)
            yield connection if self._made else None

    @contextmanager
    def _writing(self) -> Iterator[Connection]:
        with self._db.write() as connection:
            if not self._complete:
                _metadata.create_all(connection)
            yield connection
        self._made = self._complete = True


def _delete(connection: Connection, wanted: ColumnElement[bool]) -> None:
    """Delete objects and remember their ids; ids of objects that were made too long ago are forgotten."""
    oldest = select(func.max(objects.c.number) - REMEMBERED).scalar_subquery()
    connection.execute(delete(gone).where(gone.c.number < oldest))
    noted = select(objects.c.number, objects.c.id, objects.c.owner).where(wanted)
    connection.execute(insert(gone).from_select(["number", "id", "owner"], noted))
    connection.execute(delete(objects).where(wanted))


def _record(row: RowMapping) -> Record:
    return Record(**{name: row[name] for name in Record._fields})


def new_id(beginning: str) -> str:
    return f"{beginning}{uuid.uuid4().hex}"
