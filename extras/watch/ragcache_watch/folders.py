"""Watch folders, so that a store can follow them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from itertools import chain
from pathlib import Path

from ragcache.errors import ConfigError, ReaderError
from ragcache.ingest.readers import readers

# Milliseconds between attempts to find a folder that has vanished, and to sync a change that could not be synced.
POLL_MS = 500

# Ingests folders, or single files in them. Returns False if it has to be called again.
Sync = Callable[[Sequence[Path]], bool]


def watch_folders(
    folders: Iterable[str | os.PathLike[str]], sync: Sync, lost: Callable[[ReaderError], None], stop: threading.Event
) -> None:
    """Call `sync` with the folders, and then with every change in them, until `stop` is set.

    lost: called once for a folder that has vanished; it is not synced until it is back

    Raises ReaderError for a folder that is missing at the beginning or cannot be watched, ConfigError without
    watchfiles.
    """
    roots = [Path(os.path.abspath(folder)) for folder in folders]
    known = roots
    for root in roots:
        if not root.is_dir():
            raise ReaderError(root, "there is no folder of this name")
    while not stop.is_set():
        there = _present(roots)
        for root in known:
            if root not in there:
                lost(ReaderError(root, "the folder has vanished; its documents stay until it is back"))
        known = there
        if there:
            _follow(there, roots, sync, stop)
        else:
            stop.wait(POLL_MS / 1000)


def _present(roots: Iterable[Path]) -> list[Path]:
    return [root for root in roots if root.is_dir()]


def _follow(there: list[Path], roots: list[Path], sync: Sync, stop: threading.Event) -> None:
    """Sync until a folder vanishes or comes back, or `stop` is set."""
    try:
        from watchfiles import watch
    except ImportError as error:
        raise ConfigError('watchfiles is not installed; run: pip install "ragcache-kv[watch]"') from error
    due = there
    with closing(
        watch(*there, watch_filter=None, stop_event=stop, rust_timeout=POLL_MS, yield_on_timeout=True)
    ) as changes:
        try:
            first = next(changes, None)  # watches from here on, so that no change during the first sync is missed
        except FileNotFoundError:  # a folder has vanished this moment
            return
        except OSError as error:
            raise ReaderError(there[0], f"it cannot be watched ({error})") from error
        for found in chain([first or set()], changes):
            if stop.is_set() or _present(roots) != there:
                return
            due = list(dict.fromkeys([*due, *_touched([Path(path) for _, path in found], there)]))
            if due and sync(due):
                due = []


def _touched(paths: Iterable[Path], roots: list[Path]) -> list[Path]:
    """Return new and changed files; the folders themselves if something was removed, or if a folder changed."""
    files = []
    for path in paths:
        if any(part.startswith(".") for root in roots if root in path.parents for part in path.relative_to(root).parts):
            continue
        if not path.is_file():
            return roots
        if path.suffix.lower() in readers():
            files.append(path)
    return sorted(files)
