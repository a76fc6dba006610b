"""`ragcache watch` while another process changes its folder."""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
from terminal import invoke
from waiting import until

import ragcache as rc
from ragcache.errors import StoreError
from ragcache_watch.folders import watch_folders

pytest.importorskip("watchfiles", reason="needs ragcache-kv[watch]")


@pytest.fixture
def survivor():
    """Ignore SIGTERM in this process: a signal may arrive after the watching has ended."""
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    yield
    signal.signal(signal.SIGTERM, before)


def texts_in(store: Path) -> dict[str, str]:
    try:
        with rc.Store.open(store, store=rc.StoreConfig(read_only=True)) as kb:
            return {
                Path(one.id).name: "".join(chunk.text for chunk in kb.chunks_of(one.id)).strip()
                for one in kb.documents()
            }
    except StoreError:  # it is just being made
        return {}


def put(path: Path, text: str) -> None:
    """Write a file so that it is never seen half written."""
    hidden = path.with_name(f".{path.name}.new")
    hidden.write_text(text)
    hidden.rename(path)


def change(folder: Path, store: Path, failed: list[BaseException], over: threading.Event) -> None:
    """Change the folder, wait for the effect of each change, and send SIGTERM at the end."""
    try:
        until(lambda: texts_in(store) == {"a.md": "One."})
        (folder / "sub").mkdir()
        put(folder / "sub" / "b.md", "Two.")
        (folder / ".hidden.md").write_text("Nothing.")
        until(lambda: texts_in(store) == {"a.md": "One.", "b.md": "Two."})
        (folder / "a.md").rename(folder / "c.md")
        until(lambda: texts_in(store) == {"c.md": "One.", "b.md": "Two."})
        put(folder / "c.md", "Three.")
        (folder / "sub" / "b.md").unlink()
        until(lambda: texts_in(store) == {"c.md": "Three."})
        away = folder.rename(folder.with_name("away"))
        time.sleep(2)  # several looks
        assert texts_in(store) == {"c.md": "Three."}
        (away / "d.md").write_text("Four.")
        away.rename(folder)
        until(lambda: texts_in(store) == {"c.md": "Three.", "d.md": "Four."})
    except BaseException as error:
        failed.append(error)
    finally:
        while not over.is_set():
            os.kill(os.getpid(), signal.SIGTERM)
            over.wait(1)


@pytest.mark.usefixtures("survivor")
def test_a_store_follows_its_folder(model, tmp_path):
    folder, store, failed, over = tmp_path / "docs", tmp_path / "kb", [], threading.Event()
    folder.mkdir()
    (folder / "a.md").write_text("One.")
    beside = threading.Thread(target=change, args=(folder, store, failed, over))
    beside.start()
    result = invoke("watch", folder, "--store", store, "--model", model, "--kv", "lazy")
    over.set()
    beside.join()
    assert failed == []
    assert result.exit_code == 0, result.output
    errors = [line for line in result.stderr.splitlines() if line.startswith("error:")]
    assert sum("the folder has vanished" in line for line in errors) == 1
    # A look may have listed the file that was deleted, and then not found it.
    assert all("vanished" in line or f"{folder / 'sub' / 'b.md'}: " in line for line in errors), errors
    assert f"move {folder / 'a.md'} -> {folder / 'c.md'}" in result.stdout
    named = [line for line in result.output.splitlines() if ".hidden" in line]
    assert all(line.endswith(f"were skipped, such as {folder / '.hidden.md'}") for line in named), named


def test_what_cannot_be_done_now_is_tried_again(tmp_path):
    stop, calls = threading.Event(), []

    def sync(paths):
        calls.append(list(paths))
        if len(calls) == 2:
            stop.set()
        return len(calls) == 2

    watch_folders([tmp_path], sync, pytest.fail, stop)
    assert calls == [[tmp_path], [tmp_path]]


def test_what_cannot_be_watched_is_refused(store, tmp_path, monkeypatch):
    absent = invoke("watch", tmp_path / "absent", "--store", store)
    assert (absent.exit_code, "there is no folder of this name" in absent.stderr) == (1, True)
    monkeypatch.setitem(sys.modules, "watchfiles", None)
    lacking = invoke("watch", tmp_path, "--store", store)
    assert (lacking.exit_code, 'pip install "ragcache-kv[watch]"' in lacking.stderr) == (2, True)
