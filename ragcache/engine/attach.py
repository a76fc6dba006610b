"""Attaches vector stores and retrievers of other libraries, whose passages have their KV in a store of ragcache.

An adapter knows a library's objects; integrations register their adapter under the name of the library's package. An
attached object has the user's own class and state, but some of its methods are followed: after they have run, KV is
computed or removed.
"""

from __future__ import annotations

import asyncio
import copyreg
import inspect
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import wraps
from types import new_class
from typing import Any, NamedTuple, Protocol

from ragcache.errors import ConfigError, RagCacheError
from ragcache.ingest.document import Document
from ragcache.plugins import load

log = logging.getLogger(__name__)
Arguments = Mapping[str, Any]
# Attributes in which other libraries' collections have their names.
_NAMED = ("collection_name", "_collection_name", "index_name", "table_name")
# Attachments whose methods are running: methods that these call in turn are not followed again.
_RUNNING: ContextVar[tuple[Attachment, ...]] = ContextVar("ragcache_attached", default=())


class AttachableStore(Protocol):
    """The interface that an attachment needs of a store: a `RagCache`."""

    @property
    def reads_blocks(self) -> bool: ...
    def precompute(self, given: Any, *, collection: str = "", sync: bool = False, dry_run: bool = False) -> Any: ...
    def forget(
        self, ids: Iterable[str] = (), *, sources: Iterable[str] = (), given: Any = None, collection: str = ""
    ) -> list[str]: ...


@dataclass(frozen=True, eq=False)
class Attachment:
    """How an object is attached; see `attach`.

    learn:   whether found passages without KV are precomputed
    options: options of the library's adapter
    """

    kb: AttachableStore
    collection: str
    learn: bool
    options: Mapping[str, Any]

    def handles(self, passages: Iterable[Document]) -> list[str | None]:
        """Return the KV handles of found passages, computing missing KV if `learn` is set."""
        report = self.kb.precompute(list(passages), collection=self.collection, dry_run=not self.learn)
        return list(report.handles)

    def add(self, passages: Iterable[Document]) -> None:
        self.kb.precompute(list(passages), collection=self.collection)

    def forget(self, ids: Iterable[str] = (), *, sources: Iterable[str] = (), given: Any = None) -> None:
        self.kb.forget(ids, sources=sources, given=given, collection=self.collection)

    def sync(self, given: Any) -> None:
        """Remove KV of this collection's passages that are not in `given`."""
        self.kb.precompute(given, collection=self.collection, sync=True)


class Hook(NamedTuple):
    """Functions that run around a method of an attached object.

    after:  called as after(object, result, arguments by name) once the method has run; returns the new result. None:
            only `clean` is applied
    before: called as before(object, arguments by name); returns additional arguments for `after`, about data that the
            method is going to remove
    clean:  called with each argument; returns it without ragcache's own marks, as the method receives it
    """

    after: Callable[[Any, Any, Arguments], Any] | None
    before: Callable[[Any, Arguments], Arguments] | None = None
    clean: Callable[[Any], Any] = lambda value: value


class Adapter(Protocol):
    """The knowledge of another library's objects."""

    def documents(self, given: Any) -> Iterable[Document]:
        """Return the passages of a document, retriever or vector store, as the model will read them.

        `Document.source` is the id of the document that a passage was cut from. Raises ConfigError for an object that
        cannot list its passages.
        """

    def holder(self, given: Any) -> Any:
        """Return the store that names a collection, or None for a document."""

    def hooks(self, given: Any, attachment: Attachment) -> Mapping[str, Hook]:
        """Return the methods of a store or retriever that are followed.

        Raises ConfigError for an object that cannot be attached.
        """


ADAPTERS: dict[str, Adapter | str] = {
    "langchain_core": "langchain_ragcache.attachment:ADAPTER",
    "llama_index": "llama_index.ingestion.ragcache.attachment:ADAPTER",
}
"""Adapters by the name of the library's package."""


def find_adapter(given: Any) -> Adapter | None:
    packages = [cls.__module__.partition(".")[0] for cls in type(given).__mro__]
    return next((load("adapter", name, ADAPTERS) for name in packages if name in ADAPTERS), None)


def attach(given: Any, kb: AttachableStore, *, collection: str = "", learn: bool | None = None, **options: Any) -> Any:
    """Return a vector store, index or retriever of another library that keeps `kb` up to date.

    The result has the class and state of `given`, which stays unchanged. Added passages are precomputed, the KV of
    deleted passages is removed, and found passages carry their handles.

    collection: names it among the objects attached to kb; "": see `collection_of`
    learn:      whether found passages without KV are precomputed; None: if the method that kb was opened with reads
                blocks
    options:    of the library's adapter

    The user's store has priority: if KV cannot be computed or removed, this is logged and the call continues. To catch
    up with changes that bypass the attached object, call `kb.precompute(given, collection=..., sync=True)`. Raises
    ConfigError.
    """
    adapter = find_adapter(given)
    if adapter is None:
        raise ConfigError(
            f"a {type(given).__name__} cannot be attached; give a vector store, index or retriever of LangChain or "
            "LlamaIndex, with ragcache's integration installed"
        )
    learns = kb.reads_blocks if learn is None else learn
    attachment = Attachment(kb, collection or collection_of(given), learns, options)
    return _followed(given, adapter.hooks(given, attachment), attachment)


def collection_of(given: Any) -> str:
    """Return the name of a vector store's collection, or of the collection that a retriever searches.

    It consists of the store's class and its own name for the collection. Returns "" for documents and texts.
    """
    adapter = find_adapter(given)
    holder = None if adapter is None else adapter.holder(given)
    if holder is None:
        return ""
    names = (getattr(holder, name, None) for name in _NAMED)
    own = next((name for name in names if isinstance(name, str) and name), "")
    return f"{type(holder).__name__}:{own}" if own else type(holder).__name__


def _followed(given: Any, hooks: Mapping[str, Hook], attachment: Attachment) -> Any:
    """Return an object that shares the state of `given` and whose class is derived from its class."""
    own = type(given)
    methods = {name: _following(getattr(own, name), hook, attachment) for name, hook in hooks.items()}
    about = {"__module__": own.__module__, "__qualname__": own.__qualname__, "__doc__": own.__doc__}
    derived = new_class(own.__name__, (own,), exec_body=lambda body: body.update(about | methods))
    copy: Any = object.__new__(derived)
    if hasattr(given, "__dict__"):
        object.__setattr__(copy, "__dict__", given.__dict__)
    for name in copyreg._slotnames(own):  # type: ignore[attr-defined]
        if hasattr(given, name):
            object.__setattr__(copy, name, getattr(given, name))
    return copy


def _following(method: Callable[..., Any], hook: Hook, attachment: Attachment) -> Callable[..., Any]:
    signature = inspect.signature(method)

    @wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if attachment in _RUNNING.get():
            return method(self, *args, **kwargs)
        bound = signature.bind(self, *args, **kwargs)
        for name, value in bound.arguments.items():
            known = list(value) if isinstance(value, Iterator) else value  # it is read twice
            bound.arguments[name] = hook.clean(known)
        if hook.after is None:
            return method(*bound.args, **bound.kwargs)
        arguments = _by_name(signature, bound)
        with _running(attachment):
            changed = _told(hook, self, arguments)
            result = method(*bound.args, **bound.kwargs)
        if inspect.isawaitable(result):
            return later(self, result, changed)
        return _after(hook, self, result, changed, attachment)

    async def later(self: Any, result: Awaitable[Any], changed: Arguments) -> Any:
        with _running(attachment):
            value = await result
        return await asyncio.to_thread(_after, hook, self, value, changed, attachment)

    return call


def _by_name(signature: inspect.Signature, bound: inspect.BoundArguments) -> dict[str, Any]:
    more = [name for name, parameter in signature.parameters.items() if parameter.kind is parameter.VAR_KEYWORD]
    arguments = {name: value for name, value in bound.arguments.items() if name not in more}
    return {**arguments, **{name: value for key in more for name, value in bound.arguments.get(key, {}).items()}}


def _told(hook: Hook, given: Any, arguments: Arguments) -> Arguments:
    return arguments if hook.before is None else {**arguments, **hook.before(given, arguments)}


def _after(hook: Hook, given: Any, result: Any, arguments: Arguments, attachment: Attachment) -> Any:
    try:
        with _running(attachment):
            return result if hook.after is None else hook.after(given, result, arguments)
    except RagCacheError as error:
        log.warning("%s: KV does not follow (%s)", attachment.collection, error)
        return result


@contextmanager
def _running(attachment: Attachment) -> Iterator[None]:
    token = _RUNNING.set((*_RUNNING.get(), attachment))
    try:
        yield
    finally:
        _RUNNING.reset(token)
