"""Hostile files cost themselves alone: time, memory and text are bounded, and the others go on."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kit.ingestion import Kit
from pdf_files import pages, stream
from waiting import until

from ragcache.errors import CancelledError, ConfigError, ReaderError, ReaderLimitError
from ragcache.ingest.document import Document
from ragcache.ingest.read_limits import MIB, ReadLimits
from ragcache.ingest.readers import SourceFile
from ragcache.ingest.sandbox import IsolatedReader
from ragcache.models.deadline import LIMIT, Limit, limited

GOOD = {"good.md": b"# Alna\n\nA river.\n", "z.txt": b"Osby is a town.\n"}
# A machine that is busy may start a process late; no limit here is as long as that.
START_S = 30


def write(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir(exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


def names(ids: list[str]) -> list[str]:
    return sorted(Path(id).name for id in ids)


def reading(*paths: Path, **limits: Any) -> list[Document | Exception]:
    reader = IsolatedReader(ReadLimits(**limits))
    try:
        return [record for path in paths for record in reader.read(SourceFile(path, path.name))]
    finally:
        reader.close()


# Files that are small and cost much to read.


def inflating_pdf(size: int) -> bytes:
    """One page whose text operators inflate to `size` bytes."""
    line = b"(Alna) Tj 0 -1 Td\n"
    return pages(1, stream(b"BT /F 1 Tf\n" + line * (size // len(line)) + b"ET"))


def many_pages_pdf(count: int) -> bytes:
    return pages(count, stream(b"BT /F 1 Tf\n" + b"(Alna) Tj 0 -1 Td\n" * 2000 + b"ET"))


def test_a_reading_process_imports_no_model(tmp_path):
    """It starts in a moment, and has little to lose."""
    code = (
        "import sys, importlib, ragcache.ingest.sandbox_child\n"
        "from ragcache.ingest.readers import reader_of, readers\n"
        "from pathlib import Path\n"
        "[reader_of(Path('a' + suffix)) for suffix in readers()]\n"
        "print([name for name in ('torch', 'transformers', 'sqlalchemy', 'faiss') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_pdf_that_inflates_fails_by_name_and_the_others_go_on(tmp_path, lm, monkeypatch):
    """60 MB of operators in 62 KB or so: the process ends, not this one, and the next file has another process."""
    folder = write(tmp_path / "docs", {"bomb.pdf": inflating_pdf(60_000_000), **GOOD})
    assert (folder / "bomb.pdf").stat().st_size < 250_000
    with Kit(tmp_path / "kb", lm, reading=ReadLimits(seconds=60, memory_bytes=160 * MIB)) as kit:
        before = resident()
        report = kit.ingestor.ingest([folder])
        assert resident() - before < 200 * MIB
        kit.check()
    assert names(report.added) == ["good.md", "z.txt"]
    (failure,) = report.failed
    assert isinstance(failure.error, ReaderLimitError)
    assert failure.source == str(folder / "bomb.pdf")
    assert "memory" in str(failure.error)
    assert "--read-memory" in str(failure.error)


def test_a_file_that_takes_too_long_fails_by_name_in_time(tmp_path):
    path = write(tmp_path, {"pages.pdf": many_pages_pdf(5_000)}) / "pages.pdf"
    started = time.monotonic()
    (error,) = reading(path, seconds=0.5)
    assert time.monotonic() - started < 0.5 + START_S
    assert isinstance(error, ReaderLimitError)
    assert error.path == str(path)
    assert "0.5 s" in error.reason


@pytest.mark.parametrize("data", [b"<b>" * 16_000 + b"foo</p>" * 16_000, b"<a b='" * 60_000, b"<p>" * 500_000])
def test_hostile_pages_take_a_moment(tmp_path, data):
    """Parsers of Python take minutes for the first two."""
    (error,) = reading(write(tmp_path, {"a.html": data}) / "a.html", seconds=30)
    assert type(error) is ReaderError


def test_every_record_has_its_own_time(tmp_path):
    """A long file is not a slow one: what is done with its records does not count."""
    lines = "".join(json.dumps({"text": f"town {n}"}) + "\n" for n in range(2))
    path = write(tmp_path, {"a.jsonl": lines.encode()}) / "a.jsonl"
    reader = IsolatedReader(ReadLimits(seconds=1))
    found = []
    for record in reader.read(SourceFile(path, "a")):
        found.append(record)
        time.sleep(1.2)
    reader.close()
    assert [record.text for record in found] == ["town 0", "town 1"]


def test_text_is_capped_wherever_it_comes_from(tmp_path, lm):
    lines = [{"id": "long", "text": "é" * 600}, {"id": "ok", "text": "é" * 400}, {"id": "m", "text": "x"}]
    lines[2]["metadata"] = {"all": "y" * (1 << 20)}
    jsonl = "\n".join(json.dumps(line, ensure_ascii=False) for line in lines).encode()
    folder = write(tmp_path / "docs", {"a.txt": b"word " * 300, "b.jsonl": jsonl, **GOOD})
    with Kit(tmp_path / "kb", lm, reading=ReadLimits(text_bytes=1000)) as kit:
        report = kit.ingestor.ingest([folder, Document("given", "x" * 1001), Document("fits", "x" * 1000)])
    assert names(report.added) == ["fits", "good.md", "ok", "z.txt"]
    failed = {failure.source: failure.error for failure in report.failed}
    assert set(failed) == {str(folder / "a.txt"), f"{folder}/b.jsonl:1", f"{folder}/b.jsonl:3", "given"}
    assert {type(error) for error in failed.values()} == {ReaderLimitError}
    assert "--max-text" in str(failed["given"])
    assert "metadata" in str(failed[f"{folder}/b.jsonl:3"])


@pytest.mark.parametrize("encoding", ["cp1252", "utf-16-le", "cp850"])
def test_an_encoding_that_is_stated_is_taken_where_text_is_not_utf_8(tmp_path, encoding):
    own, text = "Größe: 3 €" if encoding != "cp850" else "Größe: 3", "Größe"
    data = {"a.txt": own.encode(encoding), "b.md": text.encode(), "c.csv": f"{text},1".encode(encoding)}
    bad = {"d.txt": text.encode("utf-16"), "e.txt": b"\xff\xfeG\x00r"[:-1] + b"\x00\xd8"}
    folder = write(tmp_path / "docs", data | bad)
    *found, refused = reading(*sorted(folder.iterdir()), encoding=encoding)
    texts = [one.text.strip() for one in found]
    assert [texts[0], texts[1], texts[3]] == [own, text, text]
    assert text in texts[2]
    assert "not UTF-16" in refused.reason


def test_passages_are_capped(tmp_path, lm):
    """Each has a vector and a row: 8 MiB of headings alone made 190,000."""
    text = "\n\n".join(f"# Town {n}\n\n" + "Osby has a mill. " * 12 for n in range(6))
    with Kit(tmp_path / "kb", lm, reading=ReadLimits(chunks=5)) as kit:
        report = kit.ingestor.ingest([Document("many", text), Document("few", "Alna.")])
    assert report.added == ["few"]
    assert isinstance(report.failed[0].error, ReaderLimitError)


def test_relative_paths_follow_the_working_directory(tmp_path, monkeypatch):
    reader = IsolatedReader()
    for name in ("one", "two"):
        write(tmp_path / name, {"a.txt": name.encode()})
        monkeypatch.chdir(tmp_path / name)
        assert [record.text for record in reader.read(SourceFile(Path("a.txt"), "a"))] == [name]
    reader.close()


def test_documents_come_through_the_process_unchanged(tmp_path):
    odd = 'quote " and\u2028line, 🎉 \\ \x07 é\ttab'
    line = json.dumps({"id": 5, "title": odd, "text": odd, "metadata": {"a": [1, 2.5, None, True, {"b": odd}]}})
    path = write(tmp_path, {"a.jsonl": line.encode() + b"\n{bad\n" + b'{"text": "half \\ud83d"}\n'}) / "a.jsonl"
    one, bad, half = reading(path)
    assert (one.id, one.title) == ("5", " ".join(odd.split()))
    assert one.text.endswith(odd)
    assert one.metadata == {"a": [1, 2.5, None, True, {"b": odd}]}
    assert bad.path == f"{path}:2"
    assert half.text == "half \ud83d"


def test_a_process_that_was_killed_costs_one_file(tmp_path):
    path = write(tmp_path, {"a.jsonl": b'{"text": "one"}\n{"text": "two"}\n'}) / "a.jsonl"
    reader = IsolatedReader()
    records = reader.read(SourceFile(path, "a"))
    assert next(records).text == "one"
    os.kill(reader._process._popen.pid, signal.SIGKILL)
    (error,) = records
    assert "signal 9" in error.reason
    assert [record.text for record in reader.read(SourceFile(path, "a"))] == ["one", "two"]
    reader.close()


def test_cancelling_ends_a_reader_at_once(tmp_path):
    path = write(tmp_path, {"a.pdf": many_pages_pdf(5_000)}) / "a.pdf"
    cancelled = threading.Event()
    reader = IsolatedReader()
    with limited(Limit(cancelled)):
        list(reader.read(SourceFile(write(tmp_path, GOOD) / "good.md", "a")))
        process = reader._process._popen
        threading.Timer(0.2, cancelled.set).start()
        started = time.monotonic()
        with pytest.raises(CancelledError):
            list(reader.read(SourceFile(path, "a")))
    assert time.monotonic() - started < START_S
    assert process.poll() is not None


PARENT = """
import sys, time
from pathlib import Path
from ragcache.ingest.sandbox import IsolatedReader
from ragcache.ingest.readers import SourceFile
reader = IsolatedReader()
list(reader.read(SourceFile(Path(sys.argv[1], "good.md"), "a")))
print(reader._process._popen.pid, flush=True)
list(reader.read(SourceFile(Path(sys.argv[1], "a.pdf"), "a")))
"""


def test_the_process_dies_with_a_parent_that_is_killed(tmp_path):
    """While a reader computes: it looks for its parent, not only at its input."""
    write(tmp_path, {"a.pdf": many_pages_pdf(5_000), **GOOD})
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    child = int(parent.stdout.readline())
    time.sleep(0.2)
    assert lives(child)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    until(lambda: not lives(child), seconds=10)


def lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def resident(pid: int | str = "self") -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0  # it has ended


@pytest.mark.parametrize(
    "wrong", [{"seconds": 0}, {"memory_bytes": 1000}, {"text_bytes": 0}, {"chunks": 0}, {"encoding": "?"}]
)
def test_limits_that_make_no_sense_are_refused(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        ReadLimits(**wrong)


@pytest.mark.parametrize("stage", ["cut blocks", "cut a block", "embed", "encode"])
def test_a_cancelled_ingestion_ends_amid_its_work(tmp_path, lm, monkeypatch, stage):
    """Cutting is slow and endless. Embedding and encoding go on until they are not wanted any more, which an embedder
    asks between batches, and an encoder in every layer."""
    begun, cancelled = threading.Event(), threading.Event()
    ended, is_cut = [], stage.startswith("cut")

    def cancel() -> None:
        begun.wait(60)
        ended.append(time.monotonic() + 2)
        cancelled.set()

    with Kit(tmp_path / "kb", lm) as kit:
        kit.ingestor.ingest([Document("before", "Osby is a town.")])
        place, name = {
            "cut": (kit.chunker._tokens, "count"), "embed": (kit.embedder, "embed"), "encode": (lm, "encode")
        }[stage.split()[0]]  # fmt: skip
        work = getattr(place, name)

        def slow(*given, **options):
            begun.set()
            time.sleep(0.05)
            is_needed, end = options.get("is_needed", lambda: LIMIT.get().check() is None), time.monotonic() + 20
            while not is_cut and is_needed() and time.monotonic() < end:
                time.sleep(0.01)
            return work(*given, **options)

        monkeypatch.setattr(place, name, slow)
        towns = (f"Town {n} has a mill." for n in range(200_000 if is_cut else 400))
        text = (" " if stage == "cut a block" else "\n\n").join(towns)
        cancelling = threading.Thread(target=cancel)
        cancelling.start()
        with pytest.raises(CancelledError):
            kit.ingestor.ingest(Document("long", text), cancelled=cancelled, kv="lazy" if stage == "embed" else "eager")
        cancelling.join()
        assert time.monotonic() < ended[0]
        monkeypatch.undo()
        assert kit.ids() == ["before"]
        kit.check()
        if not is_cut:
            assert kit.ingestor.ingest([Document("long", text)]).added == ["long"]


PROBE = """
import json, resource, sys, threading, time
from pathlib import Path
sys.path[:0] = json.loads(sys.argv[3])
from conftest import train_tokenizer
from ragcache.ingest.chunker import Chunker
chunker = Chunker(train_tokenizer())
chunker.split("Alna is a river. " * 2000)
text = Path(sys.argv[1]).read_text()
def status():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4
base, peak = status(), 0
def watch():
    global peak
    while True:
        peak = max(peak, status())
        time.sleep(0.02)
threading.Thread(target=watch, daemon=True).start()
chunks = chunker.split(text)
joined, squeezed = "".join("".join(c.text for c in chunks).split()), "".join(text.split())
assert joined == squeezed or ("|" in text and len(joined) > len(squeezed))  # with headers of tables
print(max(peak, status()) - base)
"""
SHAPES = {"one word": "a", "words": "a ", "lines": "a\n", "paragraphs": "a\n\n", "items": "- a\n", "headings": "# a\n"}
SHAPES |= {"tables": "| a | b |\n|-|-|\n"}
SHAPES |= {"quotes": "> - a\n", "nested": "> > - - - a\n", "prose": "The river Alna rises near Osby. It ends.\n"}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("shape", SHAPES)
def test_cutting_takes_bounded_memory(tmp_path, shape):
    """A text as long as is allowed, of any shape: tokenised whole, 8 MiB took 1.5 GB and more."""
    size, most_mib = 8 * MIB, 700
    path = tmp_path / "text"
    path.write_text(SHAPES[shape] * (size // len(SHAPES[shape])))
    here = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    code = [sys.executable, "-c", PROBE, str(path), "", json.dumps(here)]
    done = subprocess.run(code, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < most_mib * 1024


class Wide:
    """Vectors as long as MiniLM's, at once."""

    name, dimension = "wide", 384

    def embed(self, texts, *, batch_size=32):
        return np.ones((len(texts), self.dimension), np.float32)

    def embed_query(self, text):
        return self.embed([text])[0]


HEADING = f"# Alna is a river near Osby{', with a mill, a bridge and a club' * 4}\n"


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_one_document_takes_at_most_a_gigabyte(tmp_path, lm, monkeypatch):
    """The most passages that 8 MiB can be cut into: read, cut, embedded, stored and indexed."""
    monkeypatch.setattr("kit.ingestion.CountingEmbedder", Wide)
    folder = write(tmp_path / "docs", {"big.md": HEADING.encode() * (8 * MIB // len(HEADING))})
    with Kit(tmp_path / "kb", lm, max_tokens=256) as kit:
        kit.ingestor.ingest(write(tmp_path / "small", GOOD), kv="lazy")
        base = peak = resident()
        over = threading.Event()

        def watch() -> None:
            nonlocal peak
            while not over.wait(0.02):
                process = kit.ingestor.reader._process
                child = 0 if process is None else resident(process._popen.pid)
                peak = max(peak, resident() + child)

        watching = threading.Thread(target=watch)
        watching.start()
        report = kit.ingestor.ingest(folder, kv="lazy")
        over.set()
        watching.join()
    assert report.chunks > 50_000
    assert peak - base < 10**9
