"""What the kill tests kill, each in a fork."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import torch
from kit.ingestion import Kit

from ragcache.ingest.document import Document
from ragcache.models.load import load_lm
from ragcache.store.database import Database
from ragcache.store.kv_store import KVStore

SENTENCE = "The river Alna rises near Osby and ends in the lake of Tolvik."


def version_one() -> list[Document]:
    return [Document(f"d{n}", _text(n, 1, 2 + n % 3), {"version": 1}) for n in range(6)]


def version_two() -> list[Document]:
    """Two documents as they were, four changed (most of their chunks stay), four new; two share all their text."""
    changed = [Document(f"d{n}", _text(n, 2, 2 + n % 3), {"version": 2}) for n in range(2, 6)]
    new = [Document(f"n{n}", _text(20 + n // 2, 2, 4), {"version": 2}) for n in range(4)]
    return [*version_one()[:2], *changed, *new]


def _text(n: int, version: int, sentences: int) -> str:
    body = " ".join(f"Town{n} has mill number {i}. {SENTENCE}" for i in range(sentences))
    return f"# Town{n}\n\n{body}\n\n## Register\n\nTown{n} was entered in version {version}. {SENTENCE}\n"


def ingest(root: Path, lm_directory: Path, at_step: int, delay_s: float, ended: Path) -> None:
    """The child: ingests the second version, and is killed so long after that step, of which 0 is the beginning. Where
    nothing killed it, it leaves the number of steps and the seconds that they took."""
    torch.set_num_threads(1)
    passed = count()
    kill = threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGKILL))
    kill.daemon = True

    def step() -> None:
        if next(passed) == at_step:
            kill.start()

    with Kit(root, load_lm(lm_directory)) as kit, stepping(step):
        began = time.perf_counter()
        step()
        kit.ingestor.ingest(version_two())
        took = time.perf_counter() - began
    kill.cancel()
    if kill.is_alive():
        kill.join()  # it waits no longer: either it killed this process, or it never will
    ended.write_text(json.dumps([next(passed), took]))


@contextmanager
def stepping(step: Callable[[], None]) -> Iterator[None]:
    """Calls `step` before and behind every commit, and before the bytes of a block are deleted."""
    write, delete = Database.write, KVStore.delete

    @contextmanager
    def stepped_write(self: Database) -> Iterator[object]:
        with write(self) as connection:
            yield connection
            step()
        step()

    def stepped_delete(self: KVStore, key: str) -> object:
        step()
        return delete(self, key)

    Database.write, KVStore.delete = stepped_write, stepped_delete  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        Database.write, KVStore.delete = write, delete  # type: ignore[method-assign]


def write_folder(folder: Path, version: int) -> None:
    """Version 2: of five files one is gone, one renamed, one renamed onto another, one changed; one is new."""
    texts = {"gone": 1, "old": 2, "over": 3, "under": 4, "changed": 5}
    if version == 2:
        texts = {"renamed": 2, "under": 3, "changed": 6, "new": 7}
    for file in folder.glob("*.md"):
        file.unlink()
    for name, n in texts.items():
        (folder / f"{name}.md").write_text(_text(n, 1, 3))


def sync(root: Path, lm_directory: Path, folder: Path, steps: int, neighbours: int) -> None:
    """The child: synchronises the folder, and kills itself at that step."""
    torch.set_num_threads(1)
    left = [steps]

    def step() -> None:
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)

    with Kit(root, load_lm(lm_directory), neighbours=neighbours) as kit, stepping(step):
        kit.ingestor.ingest([folder], sync=True)
