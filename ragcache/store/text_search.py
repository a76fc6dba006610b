"""Full-text search of the chunks: SQLite's FTS5, ranked by BM25, or PostgreSQL's, ranked by cover density.

The first search creates the index; from then on the database updates it with every commit. One rule (`words.cut`) cuts
texts and questions into words before either database's parser sees them, so that both find the same parts of addresses,
file names, versions and signed numbers. Both reduce English words to their stems. Chinese, Japanese, Thai and other
scripts have no spaces between words: each of their letters is indexed, and a question is searched by its pairs of
neighbouring letters.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import reduce
from itertools import pairwise
from typing import Any

from sqlalchemy import Connection, Select, bindparam, column, func, literal_column, select, table, text

from ragcache.errors import StoreReadOnlyError
from ragcache.store.database import Database
from ragcache.store.schema import PREFIX, advance, chunks
from ragcache.store.words import LETTERS, MARKS, PUNCTUATION, SPACED, cut

WORDS = 64
"""The first words of a question are searched, at most so many: no question takes unbounded time."""

_TERM = re.compile(rf"(?P<run>[{LETTERS}]+)|[^\W{LETTERS}]+")
_NAME = PREFIX + "terms"
# A chunk's text never changes under its vector id.
_SQLITE = (
    f"CREATE VIRTUAL TABLE {_NAME} USING fts5(text, content='', tokenize='porter unicode61 remove_diacritics 2')",
    f"CREATE TRIGGER {_NAME}_insert AFTER INSERT ON {chunks.name} BEGIN "
    f"INSERT INTO {_NAME}(rowid, text) VALUES (new.vector_id, {SPACED}(new.text)); END",
    f"CREATE TRIGGER {_NAME}_delete AFTER DELETE ON {chunks.name} BEGIN "
    f"INSERT INTO {_NAME}({_NAME}, rowid, text) VALUES ('delete', old.vector_id, {SPACED}(old.text)); END",
    f"INSERT INTO {_NAME}(rowid, text) SELECT vector_id, {SPACED}(text) FROM {chunks.name}",
)
_BARE = f"normalize(regexp_replace(normalize(text, NFKD), '[{MARKS}]', '', 'g'), NFKC)"
_CUT = f"regexp_replace(regexp_replace({_BARE}, '[{PUNCTUATION}]', ' ', 'g'), '([{LETTERS}])', ' \\1 ', 'g')"
_KINDS = ("'english'", "'simple'")  # stems, and also unchanged words, since "it" and "who" have no stem
_VECTOR = " || ".join(f"to_tsvector({kind}, {_CUT})" for kind in _KINDS)
_POSTGRES = (f"CREATE INDEX {_NAME} ON {chunks.name} USING gin (({_VECTOR}))",)


def _is_indexed(connection: Connection) -> bool:
    """Return whether the index exists."""
    known = "SELECT 1 FROM sqlite_master WHERE name = :name"
    if connection.dialect.name == "postgresql":
        known = "SELECT 1 FROM pg_class WHERE oid = to_regclass(:name)"
    return connection.scalar(text(known), {"name": _NAME}) is not None


def _make_index(connection: Connection) -> None:
    """Index all existing and future texts."""
    for statement in _POSTGRES if connection.dialect.name == "postgresql" else _SQLITE:
        connection.execute(text(statement))


def search(database: Database, question: str, limit: int, passing: Select[Any] | None) -> list[int]:
    """Return the vector ids of the chunks that best match the question's words, best first.

    passing: a query for the vector ids to search among; None: all

    Creates the index if it is missing. Raises StoreReadOnlyError if the index cannot be created.
    """
    words = list(dict.fromkeys(_terms(question)))[:WORDS]
    if not words:
        return []
    query, id = _postgres_query(words) if database.dialect == "postgresql" else _sqlite_query(words)
    if passing is not None:
        query = query.where(id.in_(passing))
    _ensure_index(database)
    with database.read() as connection:
        return [int(found) for found in connection.scalars(query.limit(limit))]


def _terms(question: str) -> Iterator[str]:
    """Yield words, and pairs of letters in scripts without spaces between words."""
    for term in _TERM.finditer(cut(question).lower()):
        run = term["run"] or ""
        yield from map(" ".join, pairwise(run)) if len(run) > 1 else (term[0],)


def _ensure_index(database: Database) -> None:
    """Create the index if it is missing. Raises StoreReadOnlyError if that is not allowed."""
    with database.read() as connection:
        found = _is_indexed(connection)
    if not found and database.read_only:
        raise StoreReadOnlyError(
            f"{database.where}: its texts are not indexed and it was opened read-only; search it once with "
            "search='hybrid' while it is open for writing, or use search='vector'"
        )
    if not found:
        with database.write() as connection:
            advance(connection, "generation", 0)
            if not _is_indexed(connection):  # another process may have been faster
                _make_index(connection)


def _sqlite_query(words: list[str]) -> tuple[Select[Any], Any]:
    found = table(_NAME, column("rowid"), column("rank"))
    match: Any = bindparam("words", " OR ".join(f'"{word}"' for word in words))
    matches = literal_column(_NAME).op("MATCH")(match)
    return select(found.c.rowid).where(matches).order_by(found.c.rank, found.c.rowid), found.c.rowid


def _postgres_query(words: list[str]) -> tuple[Select[Any], Any]:
    vector: Any = literal_column(f"({_VECTOR})")
    each: list[Any] = [
        func.phraseto_tsquery(literal_column(kind), bindparam(None, word)) for word in words for kind in _KINDS
    ]
    match = reduce(lambda some, term: some.op("||")(term), each[1:], each[0])
    rank = func.ts_rank_cd(vector, match, 1)
    query = select(chunks.c.vector_id).where(vector.op("@@")(match)).order_by(rank.desc(), chunks.c.vector_id)
    return query, chunks.c.vector_id
