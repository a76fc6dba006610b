"""Files appear whole or not at all."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from flushes import needs_proc, record_calls

from ragcache.errors import StoreFullError, StoreReadOnlyError
from ragcache.files import atomic_write, is_leftover, make_directory, write_all


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_nothing_is_seen_before_the_end(tmp_path: Path) -> None:
    target = tmp_path / "new" / "deep" / "file"
    with atomic_write(target) as file:
        write_all(file, b"content")
        assert not target.exists()
    assert target.read_bytes() == b"content"
    assert names(target.parent) == ["file"]


@needs_proc
def test_names_are_flushed_behind_every_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power cut keeps a rename, or a new directory, only once the directory that holds the name is flushed."""
    target, calls = tmp_path / "new" / "deep" / "file", record_calls(monkeypatch)
    with atomic_write(target) as file:
        write_all(file, b"content")
        temporary = Path(file.name)
    assert calls == [
        ("make", tmp_path / "new"),
        ("flush", tmp_path),
        ("make", target.parent),
        ("flush", tmp_path / "new"),
        ("flush", temporary),
        ("rename", target),
        ("flush", target.parent),
    ]
    calls.clear()
    make_directory(target.parent)
    assert calls == []
    make_directory(tmp_path / "other")
    assert calls == [("make", tmp_path / "other"), ("flush", tmp_path)]


def test_a_failed_body_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "file"
    target.write_bytes(b"old")

    def fail() -> None:
        with atomic_write(target) as file:
            write_all(file, b"new")
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail()
    assert target.read_bytes() == b"old"
    assert names(tmp_path) == ["file"]


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (errno.ENOSPC, StoreFullError),
        (errno.EDQUOT, StoreFullError),
        (errno.EROFS, StoreReadOnlyError),
        (errno.EIO, OSError),
    ],
)
@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_errors_are_translated_and_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, expected: type[Exception], call: str
) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, call, refuse)
    with pytest.raises(expected), atomic_write(tmp_path / "file") as file:
        write_all(file, b"content")
    assert names(tmp_path) == []


def test_short_writes_are_continued(tmp_path: Path) -> None:
    class Reluctant:
        def __init__(self) -> None:
            self.data = b""

        def write(self, data: memoryview) -> int:
            self.data += bytes(data[:3])
            return min(3, len(data))

    file = Reluctant()
    write_all(file, memoryview(b"0123456789"))  # type: ignore[arg-type]
    assert file.data == b"0123456789"
    write_all(file, memoryview(b""))  # type: ignore[arg-type]
    assert file.data == b"0123456789"


def leftover(directory: Path, pid: int, age_s: float) -> Path:
    path = directory / f".file.{pid}-0123abcd.tmp"
    path.write_bytes(b"")
    os.utime(path, (time.time() - age_s, time.time() - age_s))
    return path


def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_a_running_writers_file_is_no_leftover_for_a_day(tmp_path: Path) -> None:
    assert not is_leftover(leftover(tmp_path, os.getpid(), 7200), 3600)
    assert not is_leftover(leftover(tmp_path, 1, 7200), 3600)
    assert is_leftover(leftover(tmp_path, os.getpid(), 90_000), 3600)


def test_a_dead_writers_file_is_a_leftover_after_a_while(tmp_path: Path) -> None:
    pid = dead_pid()
    assert is_leftover(leftover(tmp_path, pid, 3700), 3600)
    assert not is_leftover(leftover(tmp_path, pid, 10), 3600)
    assert not is_leftover(leftover(tmp_path, pid, -7200), 0), "a clock that jumped makes no file old"


def test_other_files_are_never_leftovers(tmp_path: Path) -> None:
    for name in ("file", ".hidden", "file.tmp", ".file.tmp", f".file.{dead_pid()}-zz.tmp"):
        (tmp_path / name).write_bytes(b"")
        os.utime(tmp_path / name, (0, 0))
        assert not is_leftover(tmp_path / name, 0)
    assert not is_leftover(tmp_path / f".gone.{dead_pid()}-0123abcd.tmp", 0)
