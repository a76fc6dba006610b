"""Shares an open store and a model's weights among all users in a process that name the same path and model.

Components of frameworks (a retriever, a chat model, a vector store) are created separately, each with the path of a
store. Shared stores and weights are released with the last component.
"""

from __future__ import annotations

import atexit
import os
import threading
from pathlib import Path
from typing import Any
from weakref import WeakSet, WeakValueDictionary

from ragcache.engine.assemble import DEFAULT_MODEL
from ragcache.engine.kb import RagCache
from ragcache.engine.store import Store
from ragcache.errors import ConfigError, StoreNotFoundError, check_type
from ragcache.models.card import ModelCard
from ragcache.models.language_model import LanguageModel
from ragcache.models.machine import AUTO

# Options that a store remembers: leaving them out means the same as naming the store's own.
_OF_STORE = ("model", "embedder", "dtype")
_THREADS = "ragcache-"  # prefix of the names of a store's own threads


class SharedRagCache(RagCache):
    """A store that closes itself when nothing refers to it."""

    key: tuple[str, dict[str, Any]]

    def __del__(self) -> None:
        if self._whole is not None or getattr(self, "_closing", None) is None or self._closed:  # or opening failed
            return
        if threading.current_thread().name.startswith(_THREADS):  # closing waits for these threads
            threading.Thread(target=self.close, name="close a store").start()
        else:
            self.close()


class SharedStores:
    """Open stores by path, and loaded weights by name, in weak references. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stores: WeakSet[SharedRagCache] = WeakSet()
        self._models: WeakValueDictionary[tuple[str, str, str], LanguageModel] = WeakValueDictionary()

    def open(self, path: RagCache | str | Path, *, collection: str | None = None, **options: Any) -> RagCache:
        """Return the store at `path` as this process has it open, or open it; return an open store unchanged.

        collection: return the store as this collection alone, which is created if it does not exist
        options: of `RagCache.open`; None is as if left out. Without model, embedder and dtype, those of the open store
                 match. If the open store has other options, the path is opened again with the same weights

        The store is closed when its last user is garbage-collected; `close` closes it for all users. Raises ConfigError
        for options beside an open store, and the errors of `RagCache.open`.
        """
        kb = self._open(path, options)
        return kb if collection is None else kb.collection(collection)

    def _open(self, path: RagCache | str | Path, options: dict[str, Any]) -> RagCache:
        given = {name: value for name, value in options.items() if value is not None}
        if isinstance(path, RagCache):
            if given:
                raise ConfigError(
                    f"{', '.join(given)}: given with a store that is open; open it with them, or give its path"
                )
            return path
        check_type("kb", path, (str, Path), "give an open RagCache or the path of a store")
        key = str(Path(path).resolve()), given
        with self._lock:
            for kb in list(self._stores):
                if not kb._closed and kb.store.layout.home.is_here and _fits(kb, key):
                    return kb
            kb = SharedRagCache.open(path, **{**key[1], **self._loaded(path, key[1])})
            kb.key = key
            self._stores.add(kb)
            self._note(kb.lm, key[1])
            return kb

    def close(self) -> None:
        """Close all open stores when the process ends."""
        for kb in list(self._stores):
            kb.close()

    def _loaded(self, path: str | Path, options: dict[str, Any]) -> dict[str, Any]:
        """Return the model that `RagCache.open` would load, if it is loaded already."""
        named = options.get("model")
        if "engine" in options or not isinstance(named, str | Path | None):
            return {}
        bound = _properties(path, options)
        name = _name(named or bound.get("model_name") or DEFAULT_MODEL)
        lm = self._models.get((name, _dtype(options) or str(bound.get("model_dtype", "")), _device(options)))
        return {} if lm is None else {"model": lm}

    def _note(self, lm: ModelCard, options: dict[str, Any]) -> None:
        """Record a loaded model under the requested dtype and under its own."""
        if isinstance(lm, LanguageModel):
            named = options.get("model")
            for name in {_name(lm.name), *([_name(named)] if isinstance(named, str | Path) else [])}:
                for dtype in (_dtype(options), str(lm.dtype).removeprefix("torch.")):
                    self._models.setdefault((name, dtype, _device(options)), lm)


def _properties(path: str | Path, options: dict[str, Any]) -> dict[str, Any]:
    try:
        with Store.open(path, store=options.get("store")) as library:
            return library.store.documents.properties()
    except StoreNotFoundError:
        return {}


def _fits(kb: SharedRagCache, key: tuple[str, dict[str, Any]]) -> bool:
    path, options = key
    where, opened = kb.key
    rest = [{name: value for name, value in one.items() if name not in _OF_STORE} for one in (options, opened)]
    if path != where or rest[0] != rest[1]:
        return False
    model, embedder, dtype = (options.get(name) for name in _OF_STORE)
    if isinstance(model, str | Path):
        model = kb.lm if _name(model) in (_name(kb.lm.name), _name(opened.get("model", ""))) else model
    if isinstance(embedder, str | Path):
        embedder = kb.embedder if str(embedder) in (kb.embedder.name, opened.get("embedder")) else embedder
    return (
        model in (None, kb.lm, opened.get("model"))
        and (embedder is None or embedder is kb.embedder)
        and dtype in (None, AUTO, opened.get("dtype"), str(getattr(kb.lm, "dtype", "")).removeprefix("torch."))
    )


def _dtype(options: dict[str, Any]) -> str:
    """Return the requested dtype, or "" if none was requested."""
    named = str(options.get("dtype") or "").removeprefix("torch.")
    return "" if named == AUTO else named


def _device(options: dict[str, Any]) -> str:
    return str(options.get("device", AUTO))


def _name(model: Any) -> str:
    """Return a directory's real path, so that links to it compare equal, or the model's name."""
    name = str(model)
    return os.path.realpath(name) if name and os.path.exists(name) else name


# The package's only global state: components that do not know each other share stores through it.
SHARED = SharedStores()
atexit.register(SHARED.close)
open_shared = SHARED.open
