"""What is changed in directories, and what is flushed to the device, in the order in which it happens."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Calls = list[tuple[str, Path]]
needs_proc = pytest.mark.skipif(
    not Path("/proc/self/fd").is_dir(), reason="what a descriptor is open on is read from /proc"
)


def record_calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Fills up while the test runs: ("make" | "rename" | "remove", name) and ("flush", file or directory)."""
    calls: Calls = []

    def recorded(name: str, what: str, place: Callable[..., Any]) -> None:
        real = getattr(os, name)

        def call(*arguments: Any, **options: Any) -> Any:
            where = Path(place(*arguments))
            found = real(*arguments, **options)
            calls.append((what, where))
            return found

        monkeypatch.setattr(os, name, call)

    recorded("mkdir", "make", lambda path, *_: path)
    recorded("unlink", "remove", lambda path: path)
    recorded("replace", "rename", lambda _source, target: target)
    recorded("fsync", "flush", lambda descriptor: os.readlink(f"/proc/self/fd/{descriptor}"))
    return calls


def unflushed(calls: Calls) -> Calls:
    """Changes of names behind which their directory was never flushed."""
    return [
        (what, path)
        for at, (what, path) in enumerate(calls)
        if what != "flush" and ("flush", path.parent) not in calls[at + 1 :]
    ]
