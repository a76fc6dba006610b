"""Backups: consistent while a writer runs, whole or not there at all, and refused when they are damaged or foreign."""

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from engine_texts import TEXTS

import ragcache as rc
from ragcache.engine import backup as backups
from ragcache.engine.backup import MANIFEST, back_up, restore
from ragcache.errors import SchemaVersionError, StoreBusyError, StoreError, StoreNotFoundError


@pytest.fixture
def backup(kb, tmp_path) -> Path:
    back_up(kb, tmp_path / "backup")
    return tmp_path / "backup"


def test_a_restored_store_answers_as_before(kb, open_kb, backup, tmp_path):
    question = "Where does the cat sit?"
    expected = kb.ask(question, sampling=rc.Sampling(max_tokens=8))
    kb.delete(["cats"])
    restore(backup, tmp_path / "again")
    with open_kb(tmp_path / "again", create=False) as again:
        assert {one.id: again.chunks_of(one.id) for one in again.documents()}.keys() == TEXTS.keys()
        answer = again.ask(question, sampling=rc.Sampling(max_tokens=8))
        assert answer.text == expected.text
        assert [hit.chunk.id for hit in answer.hits] == [hit.chunk.id for hit in expected.hits]
        assert {hit.kv for hit in answer.hits} == {"disk"}  # nothing is computed again
        assert again.doctor().sound


def test_a_backup_holds_nothing_of_running_processes(kb, backup):
    (kb.store.layout.root / "server.json").write_text("{}")
    names = {path.name for path in backup.rglob("*")}
    assert not names & {"server.json", "writer.lock", "store.sqlite3-wal"}
    assert {"ragcache.json", "store.sqlite3", MANIFEST} <= names
    with sqlite3.connect(backup / "store.sqlite3") as database:
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_a_backup_waits_for_a_writer_and_readers_go_on(kb, tmp_path):
    held, free = threading.Event(), threading.Event()

    def write() -> None:
        with kb.store.layout.writer():
            held.set()
            free.wait(30)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        assert held.wait(10)
        with pytest.raises(StoreBusyError):
            back_up(kb, tmp_path / "busy", timeout_s=0.1)
        assert not (tmp_path / "busy").exists()
    finally:
        free.set()
        writer.join()
    back_up(kb, tmp_path / "busy")


def test_blocks_that_come_and_go_meanwhile_leave_a_sound_store(kb, open_kb, tmp_path, monkeypatch):
    copy, changed = backups._copy, []

    def copied(source: Path, target: Path) -> None:
        if "kv" in source.relative_to(kb.store.layout.root).parts and not changed:
            changed.append(source)
            kb.delete(["cats"])
            kb.ingest(rc.Document("late", "A late fox crosses the yard at night."))
        copy(source, target)

    monkeypatch.setattr(backups, "_copy", copied)
    back_up(kb, tmp_path / "backup")
    monkeypatch.undo()
    assert changed
    restore(tmp_path / "backup", tmp_path / "again")
    with open_kb(tmp_path / "again", create=False) as again:
        assert {one.id for one in again.documents()} == TEXTS.keys()  # as they were when the database was copied
        for id in TEXTS:
            assert again.ask(f"What of {id}?", sampling=rc.Sampling(max_tokens=2), k=4).text
        again.doctor()
        assert again.doctor().sound


CHILD = """
import os, sys, time
from pathlib import Path
from ragcache import Store
from ragcache.engine import backup
copy = backup._copy
def slow(source, target):
    copy(source, target)
    print("copied", flush=True)
    time.sleep(60 if int(sys.argv[4]) == slow.count else 0)
    slow.count += 1
slow.count = 0
backup._copy = slow
if sys.argv[1] == "backup":
    with Store.open(sys.argv[2]) as store:
        backup.back_up(store, Path(sys.argv[3]))
else:
    backup.restore(Path(sys.argv[2]), Path(sys.argv[3]))
"""


@pytest.mark.parametrize("what", ["backup", "restore"])
def test_a_killed_copy_is_not_there_and_the_next_one_succeeds(kb, open_kb, backup, tmp_path, what):
    source, target = kb.store.layout.root if what == "backup" else backup, tmp_path / "target"
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, what, source, target, "2"], stdout=subprocess.PIPE, env=os.environ
    )
    for _ in range(3):
        assert child.stdout.readline() == b"copied\n"
    child.send_signal(signal.SIGKILL)
    child.wait(30)
    child.stdout.close()
    assert not target.exists()
    assert (tmp_path / ".target.partial").is_dir()
    if what == "backup":
        with pytest.raises(StoreNotFoundError, match="no whole backup"):
            restore(tmp_path / ".target.partial", tmp_path / "half")
        back_up(kb, target)
    else:
        restore(backup, target)
        with open_kb(target, create=False) as again:
            assert {one.id for one in again.documents()} == TEXTS.keys()
    assert not (tmp_path / ".target.partial").exists()


def changed(path: Path, **fields) -> None:
    manifest = json.loads((path / MANIFEST).read_text())
    (path / MANIFEST).write_text(json.dumps({**manifest, **fields}))


@pytest.mark.parametrize(
    ("spoil", "error", "words"),
    [
        (lambda path: (path / MANIFEST).unlink(), StoreNotFoundError, "no whole backup"),
        (lambda path: (path / MANIFEST).write_bytes(b'{"backup": 1,'), StoreError, "damaged"),
        (lambda path: (path / MANIFEST).write_bytes(b"[]"), StoreError, "damaged"),
        (lambda path: changed(path, schema=99), SchemaVersionError, "other versions"),
        (lambda path: changed(path, backup=2), SchemaVersionError, "other versions"),
        (lambda path: (path / "store.sqlite3").unlink(), StoreError, "store.sqlite3 is missing"),
        (lambda path: (path / "store.sqlite3").write_bytes(b"x"), StoreError, "store.sqlite3 is damaged"),
        (lambda path: changed(path, files={"../out": [1, ""]}), StoreError, "is missing"),
        (shutil.rmtree, StoreNotFoundError, "no whole backup"),
    ],
)
def test_a_spoilt_backup_is_refused_and_nothing_is_made(backup, tmp_path, spoil, error, words):
    spoil(backup)
    with pytest.raises(error, match=words):
        restore(backup, tmp_path / "again")
    assert not (tmp_path / "again").exists()
    assert not (tmp_path / ".again.partial").exists()


def test_a_directory_with_files_is_never_overwritten(kb, backup, tmp_path):
    for call in (lambda: back_up(kb, backup), lambda: restore(backup, kb.store.layout.root)):
        with pytest.raises(StoreNotFoundError, match="not empty"):
            call()
    (tmp_path / "empty").mkdir()
    restore(backup, tmp_path / "empty")


def test_questions_are_answered_while_a_backup_runs(kb, tmp_path, monkeypatch):
    copy, copying, answered = backups._copy, threading.Event(), threading.Event()

    def copied(*paths: Path) -> None:
        copying.set()
        assert answered.wait(30)
        copy(*paths)

    monkeypatch.setattr(backups, "_copy", copied)
    running = threading.Thread(target=back_up, args=(kb, tmp_path / "backup"))
    running.start()
    assert copying.wait(30)
    with pytest.raises(StoreBusyError):  # the writer's lock is held for the database and the index
        kb.delete(["cats"], timeout_s=0.1)
    assert kb.ask("Where does the cat sit?", sampling=rc.Sampling(max_tokens=2)).text
    answered.set()
    running.join()
    assert (tmp_path / "backup" / MANIFEST).is_file()
