"""Translation of database errors into ragcache's."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from ragcache import errors

_Translation = tuple[type[errors.StoreError], str]

_BUSY: _Translation = (errors.StoreBusyError, "another process is writing to it; try again when it has finished")
_FULL: _Translation = (errors.StoreFullError, "no space left on the device; free some space and run again")
_READ_ONLY: _Translation = (errors.StoreReadOnlyError, "cannot be written; check its permissions, or open it read-only")
_UNREACHABLE: _Translation = (errors.StoreNotFoundError, "cannot be opened; check that it exists and can be reached")
_LOST: _Translation = (errors.StoreUnreachableError, "does not answer; check that the server runs and can be reached")

# Primary result codes, https://www.sqlite.org/rescode.html
_SQLITE: dict[int, _Translation] = {
    sqlite3.SQLITE_BUSY: _BUSY,
    sqlite3.SQLITE_LOCKED: _BUSY,
    sqlite3.SQLITE_FULL: _FULL,
    sqlite3.SQLITE_READONLY: _READ_ONLY,
    sqlite3.SQLITE_PERM: _READ_ONLY,
    sqlite3.SQLITE_CANTOPEN: _UNREACHABLE,
    sqlite3.SQLITE_IOERR: (errors.StoreFailedError, "the device fails; look at the system's log"),
    sqlite3.SQLITE_NOTADB: (errors.SchemaVersionError, "not a database of ragcache; name another file"),
    sqlite3.SQLITE_CORRUPT: (errors.StoreError, "the database is damaged; restore it from a copy, or ingest again"),
}
# SQLSTATE values or classes, https://www.postgresql.org/docs/current/errcodes-appendix.html
_POSTGRES: dict[str, _Translation] = {
    "53100": _FULL,
    "25006": _READ_ONLY,
    "42501": _READ_ONLY,
    "55P03": _BUSY,
    "40": _BUSY,
    "53": _BUSY,
    "08": _LOST,
    "57P": _LOST,
    "3D": _UNREACHABLE,
    "42P01": (errors.StoreNotFoundError, "its tables were removed; restore them from a copy, or make a new store"),
    "28": (errors.StoreError, "the server refuses the login; check user and password"),
}


@contextmanager
def translate_sql_errors(where: str) -> Iterator[None]:
    """Translate the SQL engine's errors into store errors that name `where`. IntegrityError passes through: the writer
    knows which rows collide."""
    try:
        yield
    except IntegrityError:
        raise
    except PoolTimeoutError as error:
        raise errors.StoreBusyError(f"{where}: all connections are in use; try again later") from error
    except (DBAPIError, sqlite3.Error) as error:
        cause = error.orig if isinstance(error, DBAPIError) else error
        kind, advice = _translation(cause)
        raise kind(f"{where}: {advice} ({cause})") from error


def _translation(error: BaseException | None) -> _Translation:
    code = getattr(error, "sqlite_errorcode", None)
    if code is not None:
        return _SQLITE.get(code & 0xFF, (errors.StoreError, "the database reports an error"))
    state = getattr(error, "sqlstate", None)
    if state is None:  # not connected: a server that refuses says FATAL, also while it starts or stops
        message = str(error)
        return _UNREACHABLE if "FATAL" in message and "the database system is" not in message else _LOST
    known = (_POSTGRES.get(state[:length]) for length in (5, 3, 2))
    return next(filter(None, known), None) or (errors.StoreError, "the database reports an error")
