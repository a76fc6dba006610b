"""What packages add through entry points: methods, codecs, remotes, indexes, commands, engines, workers, adapters,
compressors, readers of files, routes of the server, eviction policies, admission filters.

A package registers an object under a name in one of the groups below; it is imported at its first use. The annexes that
ship beside `ragcache` in the same wheel do the same, so nothing in here names one of them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, MutableMapping
from importlib.metadata import EntryPoint, entry_points
from threading import Lock
from typing import Any, TypeVar

from ragcache.errors import PluginError

log = logging.getLogger(__name__)
METHODS = "ragcache.methods"
CODECS = "ragcache.codecs"
REMOTES = "ragcache.remotes"
INDEXES = "ragcache.indexes"
INDEX_KINDS = "ragcache.index_kinds"
COMMANDS = "ragcache.commands"
ENGINES = "ragcache.engines"
WORKERS = "ragcache.workers"
ADAPTERS = "ragcache.adapters"
COMPRESSORS = "ragcache.compressors"
READERS = "ragcache.readers"
ROUTES = "ragcache.routes"
POLICIES = "ragcache.policies"
ADMISSIONS = "ragcache.admissions"

T = TypeVar("T")


class Registry(MutableMapping[str, T]):
    """Objects of one kind by name: ragcache's own, then those of plug-ins, which never replace one of ragcache's own.

    Iteration leaves out a plug-in that cannot be imported, with one warning that names its distribution. Asking for it
    by name raises PluginError. Threads may share a registry. No lock is held while a plug-in is imported: its module
    may use the registry itself.
    """

    def __init__(self, group: str, own: Mapping[str, T] | None = None) -> None:
        self._group = group
        self._loaded: dict[str, T] = dict(own or {})
        self._own = frozenset(self._loaded)
        self._entries: Mapping[str, EntryPoint] | None = None
        self._reported: set[str] = set()
        self._lock = Lock()

    def __getitem__(self, name: str) -> T:
        if name not in self._loaded:
            self._loaded.setdefault(name, _load(self._plugins()[name]))
        return self._loaded[name]

    def __setitem__(self, name: str, value: T) -> None:
        self._loaded[name] = value

    def __delitem__(self, name: str) -> None:
        del self._loaded[name]

    def __iter__(self) -> Iterator[str]:
        plugins = self._plugins()
        for name in [name for name in plugins if name not in self._loaded and name not in self._reported]:
            try:
                self[name]
            except PluginError as error:
                self._report(name, error)
        loaded = tuple(self._loaded)
        # Plug-ins come in the order of their entry points, whichever was used first.
        return iter([*(name for name in loaded if name not in plugins), *(name for name in plugins if name in loaded)])

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _plugins(self) -> Mapping[str, EntryPoint]:
        """Return the entry points of plug-ins by name: one map, which never changes once it is built."""
        with self._lock:
            if self._entries is None:
                found = entry_points(group=self._group)
                self._entries = {entry.name: entry for entry in found if entry.name not in self._own}
            return self._entries

    def _report(self, name: str, error: PluginError) -> None:
        with self._lock:
            is_first = name not in self._reported
            self._reported.add(name)
        if is_first:
            log.warning("%s", error)


def targets(group: str) -> dict[str, str]:
    """Where the plug-ins of a group are, as "module:name" by their names; none is imported."""
    return {entry.name: entry.value for entry in entry_points(group=group)}


def _load(entry: EntryPoint) -> Any:
    """Raises PluginError, whatever importing the plug-in raises."""
    try:
        return entry.load()
    except Exception as error:
        owner = "an unknown distribution" if entry.dist is None else entry.dist.name
        raise PluginError(
            f"{owner}: its plug-in {entry.name!r} ({entry.value}) cannot be loaded: {error}; install or update "
            f"{owner} and the packages that it needs, or uninstall it"
        ) from error
