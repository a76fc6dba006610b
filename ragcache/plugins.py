"""Load objects by name: plug-ins that packages add through entry points, and objects in the annexes of the wheel.

A package registers a method, codec, command, reader, engine or router under a name in one of the groups below. Other
kinds of object are listed in a plain dict in the module that uses them; its values are objects or places such as
"ragcache_postgres.pgvector:PgVectorIndex". In both cases a module of an annex is imported at its first use.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, MutableMapping
from importlib.metadata import EntryPoint, entry_points
from threading import Lock
from typing import Any, TypeVar, cast

from ragcache.errors import PluginError, check_choice

log = logging.getLogger(__name__)
METHODS = "ragcache.methods"
CODECS = "ragcache.codecs"
COMMANDS = "ragcache.commands"
ENGINES = "ragcache.engines"
EMBEDDED = "ragcache.embedded_engines"
READERS = "ragcache.readers"
ROUTES = "ragcache.routes"

T = TypeVar("T")


class Registry(MutableMapping[str, T]):
    """Objects of one kind by name: ragcache's own, then those of plug-ins, which never replace ragcache's own.

    Iteration leaves out a plug-in that cannot be imported, with one warning that names its distribution. Looking it up
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
        # Plug-ins come in the order of their entry points, not of their first use.
        return iter([*(name for name in loaded if name not in plugins), *(name for name in plugins if name in loaded)])

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _plugins(self) -> Mapping[str, EntryPoint]:
        """Return the entry points of plug-ins by name: a map that never changes once it is built."""
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
    """Return the places of a group's plug-ins, as "module:attribute" by name, without importing any."""
    return {entry.name: entry.value for entry in entry_points(group=group)}


def load(kind: str, name: str, objects: Mapping[str, T | str]) -> T:
    """Return the object called `name`, imported if `objects` holds its place as "module:attribute".

    Args:
        kind: The kind of object, for errors: "codec".
        name: The name to look up.
        objects: A registry, or a dict of objects and places by name.

    Raises:
        ConfigError: The name is unknown. The error lists the known names.
        PluginError: The object cannot be imported.
    """
    if name not in objects:
        check_choice(kind, name, objects)
    found = objects[name]
    return cast(T, _load(EntryPoint(name, found, kind))) if isinstance(found, str) else found


def _load(entry: EntryPoint) -> Any:
    """Import an entry point's object. Raises PluginError, whatever the import raises."""
    try:
        return entry.load()
    except Exception as error:
        owner = "ragcache-kv" if entry.dist is None else entry.dist.name
        raise PluginError(
            f"{owner}: its plug-in {entry.name!r} ({entry.value}) cannot be loaded: {error}; install or update "
            f"{owner} and the packages that it needs, or uninstall it"
        ) from error
