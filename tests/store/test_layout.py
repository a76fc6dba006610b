"""The store directory and its writer lock."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import forked
import pytest
from flushes import needs_proc, record_calls, unflushed
from tiny_disk import run_on_tiny_disk
from waiting import at_once

from ragcache.errors import SchemaVersionError, StoreBusyError, StoreNotFoundError
from ragcache.store.directory import StoreLayout


def test_create_makes_a_store_once(tmp_path: Path) -> None:
    layout = StoreLayout(tmp_path / "a" / "b")
    assert not layout.exists()
    with pytest.raises(StoreNotFoundError, match="no store here"):
        layout.check()
    layout.create()
    marker = layout.marker.read_bytes()
    layout.create()
    layout.check()
    assert layout.exists()
    assert layout.marker.read_bytes() == marker
    assert sorted(path.name for path in layout.root.iterdir()) == ["ragcache.json"]


@needs_proc
def test_a_new_store_outlives_a_power_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout, calls = StoreLayout(tmp_path / "a" / "b"), record_calls(monkeypatch)
    layout.create()
    assert ("rename", layout.marker) in calls
    assert unflushed(calls) == []


def test_paths_are_below_the_root(tmp_path: Path) -> None:
    layout = StoreLayout(str(tmp_path))
    paths = (layout.marker, layout.database, layout.kv, layout.index, layout.lock)
    assert len(set(paths)) == 5
    assert all(path.parent == tmp_path for path in paths)


def test_an_empty_directory_becomes_a_store_and_others_do_not(tmp_path: Path) -> None:
    StoreLayout(tmp_path).create()
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.txt").write_text("years of work")
    (tmp_path / "file").write_text("")
    for root in (other, tmp_path / "file"):
        with pytest.raises(StoreNotFoundError, match="neither a store nor an empty directory"):
            StoreLayout(root).create()
        with pytest.raises(StoreNotFoundError):
            StoreLayout(root).check()


def test_what_a_killed_creation_left_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / ".ragcache.json.123-0123abcd.tmp").write_bytes(b'{"for')
    (tmp_path / "writer.lock").write_bytes(b"")
    layout = StoreLayout(tmp_path)
    layout.create()
    layout.check()


@pytest.mark.parametrize("marker", [b"", b"text", b"[1]", b"{}", b'{"format": "1"}', b'{"format": 2}', b"\xff\xfe"])
def test_markers_of_newer_or_other_makers_are_refused(tmp_path: Path, marker: bytes) -> None:
    layout = StoreLayout(tmp_path)
    layout.marker.write_bytes(marker)
    for action in (layout.check, layout.create):
        with pytest.raises(SchemaVersionError, match=str(tmp_path)):
            action()
    assert layout.marker.read_bytes() == marker


def test_one_writer_at_a_time_among_threads(tmp_path: Path) -> None:
    layout = StoreLayout(tmp_path)
    inside = highest = 0

    def work() -> None:
        nonlocal inside, highest
        with layout.writer(timeout_s=30):
            inside += 1
            highest = max(highest, inside)
            time.sleep(0.002)
            inside -= 1

    at_once(*[work] * 5)
    assert highest == 1


def test_the_same_thread_may_hold_the_lock_twice(tmp_path: Path) -> None:
    layout = StoreLayout(tmp_path)
    with layout.writer(0), layout.writer(0):
        pass
    with StoreLayout(tmp_path).writer(0):
        pass


def test_a_second_layout_of_the_same_store_waits_too(tmp_path: Path) -> None:
    def work() -> None:
        with pytest.raises(StoreBusyError), StoreLayout(tmp_path).writer(0):
            pass

    with StoreLayout(tmp_path).writer(0):
        at_once(work)


HOLDER = """
import sys, time
from ragcache.store.directory import StoreLayout
with StoreLayout(sys.argv[1]).writer(0):
    print("held", flush=True)
    time.sleep(60)
"""


def test_another_process_holds_the_lock_until_it_is_killed(tmp_path: Path) -> None:
    with forked.Forked(HOLDER, tmp_path) as holder:
        assert holder.stdout.readline() == "held\n"
        layout = StoreLayout(tmp_path)
        with pytest.raises(StoreBusyError, match=f"{tmp_path}: another process"), layout.writer(0.1):
            pass
        holder.kill()
        holder.wait()
        with layout.writer(1):
            pass


READ_ONLY = """
from ragcache.errors import StoreReadOnlyError
from ragcache.store.directory import StoreLayout
layout, new = StoreLayout(disk / "kb"), StoreLayout(disk / "new")
layout.create()
turn_read_only()
layout.check()
layout.create()
def lock():
    with layout.writer(1):
        pass
for action in (new.create, lock):
    with pytest.raises(StoreReadOnlyError, match=str(disk)):
        action()
"""


def test_a_read_only_disk(tmp_path: Path) -> None:
    run_on_tiny_disk(tmp_path, READ_ONLY)


def test_a_store_that_another_process_makes_meanwhile_is_no_foreign_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout, other = StoreLayout(tmp_path / "kb"), StoreLayout(tmp_path / "kb")
    layout.root.mkdir()
    entries = layout._foreign_entries

    def meanwhile() -> Iterator[Path]:
        other.create()
        other.kv.mkdir()
        return entries()

    monkeypatch.setattr(layout, "_foreign_entries", meanwhile)
    layout.create()
    layout.check()
