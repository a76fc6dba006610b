"""Connections and transactions: SQLite by default, PostgreSQL by URL."""

from __future__ import annotations

import json
import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

from sqlalchemy import URL, Connection, Engine, QueuePool, create_engine, event, make_url, text
from sqlalchemy.exc import ArgumentError

from ragcache.errors import ConfigError, StoreBusyError, StoreNotFoundError, StoreReadOnlyError
from ragcache.forks import Home
from ragcache.store import schema, words
from ragcache.store.database_errors import translate_sql_errors

# Parts of a PostgreSQL URL's query that name the place; a query may also hold a password.
_PLACE = ("host", "port", "dbname", "user", "service")
_dump_json = partial(json.dumps, ensure_ascii=False, allow_nan=False)


class Database:
    """An engine whose transactions declare whether they write, and whose errors are ragcache's.

    url:            sqlite:///path, postgresql://user@host/name, or a plain path (SQLite)
    read_only:      no transaction can write; the database has to exist
    create:         create a missing SQLite file, and the schema in an empty database; otherwise both are refused
    busy_timeout_s: how long a writer waits for another writer before StoreBusyError

    A read transaction sees one state of the database from its first to its last statement. Writers wait for each other,
    readers never wait. Raises ConfigError, StoreNotFoundError, SchemaVersionError, StoreReadOnlyError, StoreBusyError,
    and ForkedError in a fork of the process: a connection does not survive a fork.
    """

    def __init__(
        self, url: str | Path, *, read_only: bool = False, create: bool = True, busy_timeout_s: float = 30.0
    ) -> None:
        parsed = _parse(url)
        self.read_only = read_only
        self._create = create
        self._busy_timeout_s = busy_timeout_s
        self.where = parsed.database or "" if _is_sqlite(parsed) else address(url)
        self.home = Home(f"{self.where}: this store was opened", "open it")
        build = self._sqlite_engine if _is_sqlite(parsed) else self._postgres_engine
        self._engine = build(parsed)
        self._file: tuple[int, int] | None = None
        try:
            if self.dialect == "sqlite" and not read_only:
                self._use_wal()  # makes the file
            self._file = self._present_file()
            self._prepare()
        except BaseException:
            self._engine.dispose()
            raise

    @property
    def dialect(self) -> str:
        return self._engine.dialect.name

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """Begin a transaction that sees one state throughout and cannot write."""
        self.home.check()
        with translate_sql_errors(self.where), self._engine.connect() as connection:
            if self.dialect == "postgresql":
                connection.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)
            with connection.begin():
                yield connection

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """Begin a transaction that is committed when the body ends and rolled back when it raises.

        IntegrityError passes through. Raises StoreReadOnlyError, StoreBusyError, StoreFullError, and StoreNotFoundError
        if SQLite's file was removed or replaced.
        """
        self.home.check()
        if self.read_only:
            raise StoreReadOnlyError(f"{self.where}: opened read-only; open it for writing to change it")
        if self._file != self._present_file():  # SQLite would go on writing to a file that has no name any more
            raise StoreNotFoundError(
                f"{self.where}: the database was removed or replaced since it was opened; open the store again"
            )
        with self._translated_write_errors(), self._engine.connect() as connection:
            connection.execution_options(ragcache_writes=True)
            with connection.begin():
                if self.dialect == "postgresql":
                    wait_ms = max(1, int(self._busy_timeout_s * 1000))
                    connection.execute(text(f"SET LOCAL lock_timeout = {wait_ms}"))
                yield connection

    def close(self) -> None:
        self._engine.dispose()

    def _prepare(self) -> None:
        if self.read_only:
            with self.read() as connection:
                schema.check(connection, self.where)
            return
        with self.write() as connection:
            schema.prepare(connection, self.where, create=self._create)

    @contextmanager
    def _translated_write_errors(self) -> Iterator[None]:
        """Translate errors of a write. SQLite also reports "unable to open" if it may not create a file: on a read-only
        disk, or without permission."""
        try:
            with translate_sql_errors(self.where):
                yield
        except StoreNotFoundError as error:
            if self.dialect != "sqlite" or not Path(self.where).absolute().parent.is_dir():
                raise
            raise StoreReadOnlyError(f"{self.where}: cannot be written; check its permissions") from error

    def _present_file(self) -> tuple[int, int] | None:
        """Return device and inode of SQLite's file, which identify it; None if there is no such file."""
        if self.dialect != "sqlite":
            return None
        try:
            status = os.stat(self.where)
        except FileNotFoundError:
            return None
        return status.st_dev, status.st_ino

    def _use_wal(self) -> None:
        """Switch to a write-ahead log, so that readers see the last commit while a writer works. The file keeps the
        mode."""
        uri = _sqlite_uri(Path(self.where), read_only=False)
        deadline = time.monotonic() + self._busy_timeout_s
        while True:
            try:
                with self._translated_write_errors(), closing(self._connect(uri)) as raw:
                    raw.execute("PRAGMA journal_mode = WAL")
                return
            except StoreBusyError:  # the change locks the whole file for a moment, and SQLite does not wait for that
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)

    def _sqlite_engine(self, url: URL) -> Engine:
        path = Path(url.database or "")
        if not url.database or url.database == ":memory:":
            raise ConfigError("a store in memory would vanish with its connection; name a file")
        if (self.read_only or not self._create) and not path.exists():
            way_out = "open the store once for writing to make it" if self._create else "restore it from a copy"
            raise StoreNotFoundError(f"{path}: no such database; {way_out}")
        uri = _sqlite_uri(path, self.read_only)
        engine = create_engine(
            "sqlite://",
            creator=lambda: self._connect(uri),
            poolclass=QueuePool,
            max_overflow=-1,
            json_serializer=_dump_json,
        )
        event.listen(engine, "begin", _begin)
        return engine

    def _connect(self, uri: str) -> sqlite3.Connection:
        # isolation_level None: the driver begins no transaction itself, `_begin` does.
        connection = sqlite3.connect(
            uri, uri=True, timeout=self._busy_timeout_s, isolation_level=None, check_same_thread=False
        )
        connection.execute("PRAGMA foreign_keys = ON")
        # A reported commit also survives a power cut. Compared with NORMAL, it costs one more flush of the log per
        # document, which is small beside the flushes of its KV blocks: these are a thousand times larger.
        connection.execute("PRAGMA synchronous = FULL")
        # The text index's triggers call it.
        connection.create_function(words.SPACED, 1, words.spaced, deterministic=True)
        return connection

    def _postgres_engine(self, url: URL) -> Engine:
        try:
            return create_engine(
                url.set(drivername="postgresql+psycopg"),
                max_overflow=-1,
                pool_pre_ping=True,
                connect_args={"connect_timeout": 10},
                json_serializer=_dump_json,
            )
        except ModuleNotFoundError as error:
            raise ConfigError("PostgreSQL needs the driver: pip install 'ragcache-kv[postgres]'") from error


def address(url: str | Path) -> str:
    """Return the database's name without a secret: the absolute path of a SQLite file, or
    postgresql://user@host:port/name. Raises ConfigError."""
    parsed = _parse(url)
    if _is_sqlite(parsed):
        return str(Path(parsed.database or "").absolute())
    named = {key: value for key, value in parsed.query.items() if key in _PLACE}
    place = (parsed.host, parsed.port, parsed.database)
    return URL.create("postgresql", parsed.username, None, *place, named).render_as_string()


def _parse(url: str | Path) -> URL:
    if isinstance(url, Path) or "://" not in url:
        return URL.create("sqlite", database=str(url))
    try:
        parsed = make_url(url)
    except ArgumentError as error:
        raise ConfigError(f"not a database URL ({error}); sqlite:///path or postgresql://user@host/name are") from error
    if parsed.get_backend_name() not in ("sqlite", "postgresql"):
        raise ConfigError(f"{parsed.get_backend_name()!r} is no supported database; sqlite and postgresql are")
    return parsed


def _is_sqlite(url: URL) -> bool:
    return url.get_backend_name() == "sqlite"


def _begin(connection: Connection) -> None:
    """Take the write lock at once for a write: a reader that becomes a writer could find its state outdated, and
    fail."""
    writes = connection.get_execution_options().get("ragcache_writes", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _sqlite_uri(path: Path, read_only: bool) -> str:
    uri = path.absolute().as_uri()
    if not read_only:
        return f"{uri}?mode=rwc"
    return f"{uri}?immutable=1" if _is_frozen(path, uri) else f"{uri}?mode=ro"


def _is_frozen(path: Path, uri: str) -> bool:
    """Return whether no write-ahead log exists or can be created beside the file (a read-only medium, a full disk).

    No process can then be writing the file, but SQLite refuses to open it unless it is opened as immutable.
    """
    log = path.with_name(path.name + "-wal")
    if log.exists() and log.stat().st_size:
        return False
    try:
        with closing(sqlite3.connect(f"{uri}?mode=ro", uri=True)) as connection:
            connection.execute("SELECT 1 FROM sqlite_master")
    except sqlite3.OperationalError as error:
        return error.sqlite_errorcode & 0xFF in (
            sqlite3.SQLITE_CANTOPEN,
            sqlite3.SQLITE_READONLY,
            sqlite3.SQLITE_FULL,
            sqlite3.SQLITE_IOERR,
        )
    except sqlite3.DatabaseError:  # not a database: reading it raises the error
        return False
    return False
