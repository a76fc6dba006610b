"""Every error that ragcache raises on purpose.

    RagCacheError
    ├── ConfigError                     an argument or option is out of range (also a ValueError)
    │   └── UnknownOptionError          a call or a configuration has no option of this name (also a TypeError)
    ├── PromptError                     a question or prompt that cannot be run
    │   ├── ContextTooLongError
    │   ├── AnswerTooLargeError         its KV would take more memory than all answers together may
    │   └── LayoutError                 a request's layout that does not fit its prompt (vLLM)
    ├── ModelError
    │   ├── ModelNotFoundError          not a directory or hub id of a model
    │   ├── AdapterError                an adapter that is damaged, or belongs to another model
    │   ├── DeviceError                 the model's device failed, or has no memory left
    │   └── UnsupportedModelError       a model whose keys cannot be moved exactly
    ├── EmbedderError                   the embedding model is absent or damaged
    ├── RerankerError                   the reranker is absent, damaged or no cross-encoder
    ├── ForeignPackageError             another project's package `ragcache` is installed beside this one (also an
    │                                   ImportError)
    ├── PluginError                     a plug-in of another distribution that cannot be loaded
    ├── NotAllowedError                 an API key's scopes or collections do not allow the request
    ├── EngineError                     another engine (vLLM) cannot be reached, refuses, or broke off
    ├── ForkedError                     a store or model of a parent process is used in its fork
    ├── CancelledError                  the caller gave up
    ├── TimedOutError                   the time that the caller allowed is over
    ├── ClusterError                    a Ray cluster that cannot be used, or that lost its actors
    ├── TraceError                      a log of requests that cannot be read or written: file, line, reason
    ├── StoreError
    │   ├── StoreNotFoundError
    │   ├── StoreMismatchError          made by another model, embedder or schema version
    │   │   ├── ModelMismatchError
    │   │   ├── EmbedderMismatchError
    │   │   ├── DatabaseMismatchError   the folder's documents are in another database
    │   │   └── SchemaVersionError
    │   ├── StoreClosedError
    │   ├── StoreBusyError              another process is writing
    │   ├── StoreReadOnlyError
    │   ├── StoreFullError              no space left on the device
    │   ├── StoreFailedError            the device that holds the store fails (EIO)
    │   ├── StoreUnreachableError       a database server or a remote does not answer
    │   ├── SealError                   the store's key is missing, open to others, or of another store
    │   ├── PinError                    pinned blocks would fill a tier
    │   ├── BlockError
    │   │   ├── DamagedBlockError       broken seal, or bytes that cannot be parsed
    │   │   ├── StaleBlockError         another fingerprint, recipe or prefix
    │   │   ├── MissingBlockError
    │   │   └── UnencodableBlockError   numbers that the store's codec cannot keep
    │   ├── BasisError                  no basis can be made for the store's codec
    │   ├── DamagedIndexError
    │   ├── FilterError                 a metadata filter that cannot be evaluated
    │   ├── NoSuchDocumentError
    │   ├── NoSuchCollectionError       a collection that does not exist, or that the caller may not see
    │   └── UnknownHandleError          a passage without text whose handle or id names nothing here
    └── IngestError
        ├── ReaderError                 one file could not be read: path and reason
        │   └── ReaderLimitError        reading it takes more time, memory or text than is allowed
        ├── DuplicateDocumentError
        │   └── DocumentExistsError     another text is stored under the id, and is not to be replaced
        └── MetadataError               metadata that is not JSON

Messages name the input and the way out. Third-party errors are translated where they enter (`translate_os_errors`
for files; the SQL engine and the model loader do the same at their own boundary).
"""

from __future__ import annotations

import errno
import os
import reprlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from numbers import Real
from typing import Any, ClassVar, Self, TypeGuard


class RagCacheError(Exception):
    """Base of every error raised on purpose."""


class ConfigError(RagCacheError, ValueError):
    """An argument or option is out of range, unknown or contradictory.

    option: name of the option at fault, if it is a single option
    """

    def __init__(self, message: str = "", option: str | None = None) -> None:
        super().__init__(message)
        self.option = option


class UnknownOptionError(ConfigError, TypeError):
    """A call or a configuration has no option of this name."""


class PromptError(RagCacheError):
    """A question or a prompt cannot be run."""


class ContextTooLongError(PromptError):
    """The prompt has more tokens than the model has positions."""


class AnswerTooLargeError(PromptError):
    """Prompt and answer need more memory for their KV than all answers together may take."""


class LayoutError(PromptError):
    """A request's layout is malformed, or does not fit its prompt."""


class ModelError(RagCacheError):
    """A language model cannot be used."""


class ModelNotFoundError(ModelError):
    """The name is neither a directory with a model nor a hub id that can be loaded."""


class AdapterError(ModelError):
    """An adapter is damaged, or belongs to a model other than the base that it names."""


class DeviceError(ModelError):
    """The model's device failed during a pass, or has no memory left for it."""


class UnsupportedModelError(ModelError):
    """The model's keys cannot be moved exactly; the message names the reason."""


class EmbedderError(RagCacheError):
    """The embedding model is absent, damaged or unusable."""


class RerankerError(RagCacheError):
    """The reranker is absent, damaged, or a model of another kind."""


class ForeignPackageError(RagCacheError, ImportError):
    """Another project's package has the same import name and is installed beside this one."""


class PluginError(RagCacheError):
    """A plug-in cannot be loaded; the message gives its name, its distribution and the reason."""


class EngineError(RagCacheError):
    """Another engine cannot be reached, refuses the request, or broke off its answer."""


class ForkedError(RagCacheError):
    """A store, model or embedder is used in a fork of the process that it was made in."""


class CancelledError(RagCacheError):
    """The caller cancelled the request."""


class TimedOutError(RagCacheError):
    """The time that the caller allowed has passed."""


class ClusterError(RagCacheError):
    """A Ray cluster does not answer, lacks resources for its actors, or loses the actors repeatedly."""


class TraceError(RagCacheError):
    """A log of requests cannot be read or written. `path`, `line` (None for the whole file) and `reason` give the place
    and cause."""

    def __init__(self, path: str | os.PathLike[str], reason: str, line: int | None = None) -> None:
        self.path = os.fspath(path)
        self.line = line
        self.reason = reason
        super().__init__(f"{self.path}{'' if line is None else f', line {line}'}: {reason}")


class StoreError(RagCacheError):
    """A store cannot be opened, read or written."""


class StoreNotFoundError(StoreError):
    """No store is at the path."""


class StoreMismatchError(StoreError):
    """The store was made by another model, embedder or version."""


class ModelMismatchError(StoreMismatchError):
    """The store's KV blocks belong to another language model."""


class EmbedderMismatchError(StoreMismatchError):
    """The store's index was made by another embedding model."""


class DatabaseMismatchError(StoreMismatchError):
    """The store's documents are in a database other than the named database or the database in its folder."""


class SchemaVersionError(StoreMismatchError):
    """The store was written by a newer version of ragcache, or by something else."""


class StoreClosedError(StoreError):
    """The store is already closed."""


class StoreBusyError(StoreError):
    """Another process is writing to the store."""


class StoreReadOnlyError(StoreError):
    """The store's directory or database cannot be written."""


class StoreFullError(StoreError):
    """The device that holds the store has no space left."""


class StoreUnreachableError(StoreError):
    """A database server or a remote that holds blocks does not answer, or not in time.

    retry_s: seconds to wait before the next attempt
    """

    def __init__(self, message: str, retry_s: float = 2.0) -> None:
        super().__init__(message)
        self.retry_s = retry_s


class StoreFailedError(StoreError):
    """The device or file system that holds the store fails: reading or writing it is an I/O error."""


class SealError(StoreError):
    """The key that seals a store's files is missing, open to others, or not the key that they were sealed with."""


class PinError(StoreError):
    """The blocks to pin would leave a tier no room for others."""


class BlockError(StoreError):
    """A KV block cannot be served."""


class DamagedBlockError(BlockError):
    """A block's seal is broken or of another store, or its bytes cannot be parsed."""


class StaleBlockError(BlockError):
    """A block was made under another fingerprint, recipe or prefix."""


class MissingBlockError(BlockError):
    """A handle names a block that no tier holds."""


class UnencodableBlockError(BlockError):
    """A block holds NaN, infinities or a dtype that the store's codec cannot encode."""


class BasisError(StoreError):
    """A codec needs a basis that cannot be made: there are too few tokens, or there is no room for it."""


class DamagedIndexError(StoreError):
    """The vector index on disk cannot be read; it is rebuilt from SQL."""


class FilterError(StoreError):
    """A metadata filter is malformed."""


class NoSuchDocumentError(StoreError):
    """No document has this id."""


class NoSuchCollectionError(StoreError):
    """No collection has this name, or the caller may not see it."""


class NotAllowedError(RagCacheError):
    """An API key's scopes or collections do not allow the request."""


class UnknownHandleError(StoreError):
    """A passage came without its text, and neither its handle nor its id names a chunk of this store."""


class IngestError(RagCacheError):
    """An input cannot be ingested."""


class ReaderError(IngestError):
    """A file could not be read. `path` and `reason` name the file and the cause."""

    def __init__(self, path: str | os.PathLike[str], reason: str) -> None:
        self.path = os.fspath(path)
        self.reason = reason
        super().__init__(f"{self.path}: {reason}")

    def __reduce__(self) -> tuple[type[Self], tuple[str, str]]:
        return type(self), (self.path, self.reason)


class ReaderLimitError(ReaderError):
    """Reading a file takes more time or memory than allowed, or yields more text."""


class DuplicateDocumentError(IngestError):
    """Two inputs of one call carry the same document id."""


class DocumentExistsError(DuplicateDocumentError):
    """Another text is stored under the id and may not be replaced."""


class MetadataError(IngestError):
    """Document metadata is not a JSON object."""


@contextmanager
def blaming(option: str) -> Iterator[None]:
    """Set `option` on a ConfigError that the `with` block raises without naming an option."""
    try:
        yield
    except ConfigError as error:
        error.option = error.option or option
        raise


def first_line(error: Exception) -> str:
    """Return the first line of a third-party error's message, or its type's name if the message is empty."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def check_choice(name: str, value: object, choices: Iterable[str]) -> None:
    """Raise ConfigError that lists the choices if the value is not among them."""
    if value not in (known := list(choices)):
        raise ConfigError(f"{name} {value!r} is unknown; choose one of {', '.join(known)}", name)


def check_type(name: str, value: object, kinds: type | tuple[type, ...], way_out: str) -> None:
    """Raise ConfigError naming the option and the way out if the value is of another type."""
    if not isinstance(value, kinds):
        raise ConfigError(f"{name} is {reprlib.repr(value)}, of type {type(value).__name__}; {way_out}", name)


class Config:
    """Base of the dataclasses of options. An unknown option raises UnknownOptionError, which hints at the right name.

    elsewhere: keyword arguments of the class statement: for a field, the names that other libraries give it, separated
               by spaces (`max_tokens="chunk_size"`)
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]
    _elsewhere: ClassVar[dict[str, str]]

    def __init_subclass__(cls, **elsewhere: str) -> None:
        cls._elsewhere = elsewhere

    def __new__(cls, *_args: Any, **fields: Any) -> Self:
        if unknown := [name for name in fields if name not in cls.__dataclass_fields__]:
            ways = ", ".join(way for name in unknown if (way := cls.said(name)))
            out = f"say {ways}" if ways else f"the options are {', '.join(cls.__dataclass_fields__)}"
            raise UnknownOptionError(f"there is no option {', '.join(unknown)}; {out}", unknown[0])
        return super().__new__(cls)

    @classmethod
    def said(cls, name: str) -> str | None:
        """Return how to write a field, as "rc.ChunkerConfig(max_tokens=...)"; None if no field has this name.

        name: the field's name here or in another library
        """
        named = (field for field in cls.__dataclass_fields__ if name in (field, *cls._elsewhere.get(field, "").split()))
        return next((f"rc.{cls.__name__}({field}=...)" for field in named), None)


def check_text(text: str) -> None:
    """Raise PromptError if the text is not valid Unicode, as after a cut between the halves of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptError(
            f"a text holds half of a surrogate pair at character {error.start}: {reprlib.repr(text)}; cut texts "
            "between characters, or remove it"
        ) from error


def is_whole(value: object) -> TypeGuard[int]:
    """Return whether the value is an int, and not True or False."""
    return isinstance(value, int) and not isinstance(value, bool)


def check_least(name: str, value: float, least: float) -> None:
    """Raise ConfigError naming the option if the value is below `least` or not a number."""
    check_type(name, value, Real, f"give a number, at least {least:g}")
    if not value >= least:
        raise ConfigError(f"{name} is {value}; it must be at least {least:g}", name)


FAILED = {errno.EIO, errno.ENXIO, errno.ENODEV, errno.ESTALE}
"""Errors of a device or file system that is broken or gone."""


@contextmanager
def translate_os_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    """Translate errors of the operating system in the `with` block into store errors that name `path`.

    Raises StoreFullError (ENOSPC, EDQUOT), StoreReadOnlyError (EROFS, EACCES, EPERM) and StoreFailedError (EIO and the
    like); others pass through.
    """
    try:
        yield
    except OSError as error:
        where = os.fspath(path)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StoreFullError(f"{where}: no space left on the device; free some space and run again") from error
        if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            raise StoreReadOnlyError(f"{where}: cannot be written ({error.strerror}); check its permissions") from error
        if error.errno in FAILED:
            raise StoreFailedError(
                f"{where}: the device fails ({error.strerror}); look at the system's log, and move the store to another"
            ) from error
        raise
