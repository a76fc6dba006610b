"""Whole ingestions with a tiny model: what is stored, what is not computed again, what is deleted."""

import json
import threading
import time
from functools import partial

import numpy as np
import pytest
import torch
from blocks import garbage_of, tier_of
from covering import covering
from kit.ingestion import Kit, chunker_of
from random_texts import text_of
from waiting import at_once

from ragcache.errors import (
    ConfigError,
    ContextTooLongError,
    DuplicateDocumentError,
    IngestError,
    MetadataError,
    ReaderError,
    StoreBusyError,
    StoreFullError,
)
from ragcache.ingest.document import Document
from ragcache.store.directory import StoreLayout
from ragcache.store.places import Place


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "docs"
    (path / "sub").mkdir(parents=True)
    (path / "a.md").write_text(text_of("Tolvik"))
    (path / "b.txt").write_text(text_of("Osby", 2))
    (path / "sub" / "c.html").write_text("<title>Mora</title><h1>Mora</h1><p>Mora has a club.</p>")
    (path / "d.jsonl").write_text('{"id": "x", "text": "Lund has a bridge.", "metadata": {"year": 1901}}\n')
    return path


def test_a_folder_becomes_documents_chunks_blocks_and_vectors(kit, folder, lm):
    report = kit.ingestor.ingest([folder])
    assert sorted(report.added) == kit.ids() == [*(str(folder / name) for name in ("a.md", "b.txt", "sub/c.html")), "x"]
    assert not report.failed
    assert not report.updated
    assert kit.documents.document("x").metadata == {"year": 1901}
    kit.check()
    chunks = [chunk for id in kit.ids() for chunk in kit.documents.chunks_of(id)]
    assert (report.chunks, report.tokens) == (len(chunks), sum(len(chunk.token_ids) for chunk in chunks))
    assert set(kit.kv.keys()) == {chunk.handle for chunk in chunks}
    assert report.computed_tokens == report.tokens == kit.encoder.tokens
    for chunk in chunks:
        (alone,) = lm.encode([chunk.token_ids])
        torch.testing.assert_close(kit.kv.get(chunk.handle).block.keys, alone.keys, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(kit.kv.get(chunk.handle).block.values, alone.values, atol=1e-5, rtol=1e-5)
    assert kit.retriever.retrieve("Lund bridge", 1)[0].chunk.document_id == "x"
    seconds = report.seconds
    assert seconds.total_s >= max(seconds.encode_s, seconds.commit_s, seconds.chunk_s) > 0


def test_unchanged_input_costs_no_model_time(kit, folder):
    kit.ingestor.ingest([folder])
    before = (kit.encoder.tokens, kit.embedder.texts, kit.documents.generation())
    report = kit.ingestor.ingest([folder, folder / "sub", folder / "a.md"])
    assert sorted(report.unchanged) == kit.ids()
    assert (report.added, report.updated, report.failed, report.computed_tokens) == ([], [], [], 0)
    assert (kit.encoder.tokens, kit.embedder.texts, kit.documents.generation()) == before


def test_other_settings_of_the_chunker_cut_the_documents_anew(kit, tmp_path, lm):
    """What is stored afterwards is what a new store would hold."""
    documents = [Document(name, text_of(name)) for name in ("Tolvik", "Osby")]
    kit.ingestor.ingest(documents)
    for number, more in enumerate(({}, {"overlap": 8}, {"min_tokens": 0})):
        chunker = chunker_of(lm.tokenizer, max_tokens=40, **more)
        with Kit(tmp_path / f"new {number}", lm) as new:
            new.ingestor.ingest(documents, chunker=chunker)
            assert kit.ingestor.ingest(documents, chunker=chunker).updated == ["Tolvik", "Osby"]
            assert kit.ingestor.ingest(documents, chunker=chunker).unchanged == ["Tolvik", "Osby"]
            assert kit.texts() == new.texts()
    kit.check()


def test_a_changed_document_is_replaced_and_its_old_blocks_are_gone(kit):
    kit.ingestor.ingest([Document("a", text_of("Tolvik")), Document("b", text_of("Osby"))])
    old = set(kit.kv.keys())
    texts = kit.texts()
    changed = text_of("Tolvik") + "\nMora has a club.\n"
    report = kit.ingestor.ingest([Document("a", changed), Document("b", text_of("Osby"))])
    assert (report.updated, report.unchanged, report.added) == (["a"], ["b"], [])
    assert report.reused_blocks > 0
    assert report.computed_tokens < report.tokens
    assert "".join("".join(kit.texts()["a"]).split()) == "".join(changed.split())
    assert kit.texts()["b"] == texts["b"]
    assert set(kit.kv.keys()) == kit.documents.handles() != old
    kit.check()


@pytest.mark.parametrize("change", [{"metadata": {"a": 2}}, {"title": "New"}, {"source": "elsewhere"}])
def test_anything_but_the_text_is_a_change_that_reuses_every_block(kit, change):
    first = {"id": "a", "text": text_of("Tolvik"), "metadata": {"a": 1}, "title": "Old", "source": "s"}
    kit.ingestor.ingest([Document(**first)])
    computed = kit.encoder.tokens
    assert kit.ingestor.ingest([Document(**{**first, **change})]).updated == ["a"]
    assert kit.encoder.tokens == computed
    assert getattr(kit.documents.document("a"), next(iter(change))) == next(iter(change.values()))
    kit.check()


def test_a_block_that_two_documents_share_outlives_one_of_them(kit):
    kit.ingestor.ingest([Document("a", "Mora has a club."), Document("b", "Mora has a club.")])
    assert len(set(kit.kv.keys())) == 1
    assert kit.ingestor.delete(["a"]) == ["a"]
    kit.check()
    assert len(set(kit.kv.keys())) == 1
    kit.ingestor.delete(["b"])
    assert list(kit.kv.keys()) == []


@pytest.mark.parametrize("kind", ["flat", "hnsw"])
def test_delete_reaches_text_vectors_index_and_every_tier(tmp_path, lm, kind):
    with Kit(tmp_path / "kb", lm, kind=kind) as kit:
        secret = "Zanzibar keeps quokkas."
        kit.ingestor.ingest([Document("a", text_of("Tolvik")), Document("s", secret), Document("b", text_of("Osby"))])
        (chunk,) = kit.documents.chunks_of("s")
        vector = kit.retriever.index.vectors_present(np.array([chunk.vector_id]))[1][0].tobytes()
        path = tmp_path / "kb" / "index.faiss"
        assert vector in path.read_bytes()
        assert tier_of(kit.kv, chunk.handle) == "memory"
        assert kit.ingestor.delete(["s", "absent"]) == ["s"]
        assert kit.documents.document("s") is None
        assert tier_of(kit.kv, chunk.handle) is None
        assert chunk.handle not in set(kit.kv.keys())
        assert vector not in path.read_bytes()
        assert chunk.vector_id not in kit.retriever.index
        assert garbage_of(kit.documents) == set()
        kit.check()
    for file in (tmp_path / "kb").rglob("*"):
        if file.is_file():
            assert b"quokkas" not in file.read_bytes(), file
            assert vector not in file.read_bytes(), file


def test_lazy_computes_nothing_and_a_later_eager_run_only_the_blocks(kit, folder):
    report = kit.ingestor.ingest([folder], kv="lazy")
    assert len(report.added) == 4
    assert (kit.encoder.tokens, list(kit.kv.keys()), kit.documents.handles()) == (0, [], set())
    assert kit.retriever.retrieve("Lund bridge", 1)[0].handle is None
    embedded, generation = kit.embedder.texts, kit.documents.generation()
    assert len(kit.ingestor.ingest([folder], kv="lazy").unchanged) == 4
    later = kit.ingestor.ingest([folder])
    assert len(later.unchanged) == 4
    assert later.computed_tokens == report.tokens
    assert (kit.embedder.texts, kit.documents.generation()) == (embedded, generation)
    kit.check()
    with pytest.raises(ConfigError, match="sometimes"):
        kit.ingestor.ingest([folder], kv="sometimes")


def test_lazy_takes_blocks_that_are_there_anyway(kit):
    kit.ingestor.ingest([Document("a", "Mora has a club.")])
    kit.ingestor.ingest([Document("b", "Mora has a club.")], kv="lazy")
    kit.check()


def test_a_lost_block_is_computed_again_without_touching_the_document(kit):
    kit.ingestor.ingest([Document("a", text_of("Tolvik")), Document("b", "Mora has a club.")])
    lost = kit.documents.chunks_of("a")[1]
    kit.kv.delete(lost.handle)
    report = kit.ingestor.ingest([Document("a", text_of("Tolvik")), Document("b", "Mora has a club.")])
    assert report.computed_tokens == len(lost.token_ids)
    assert kit.documents.chunks_of("a")[1] == lost
    kit.check()


def test_bad_inputs_are_reported_with_their_reason_and_the_others_go_on(kit, folder, tmp_path):
    (folder / "bad.txt").write_bytes(b"caf\xe9")
    (folder / "empty.md").write_text(" \n")
    (folder / "picture.png").write_bytes(b"\x89PNG")
    (folder / ".hidden.txt").write_text("secret")
    report = kit.ingestor.ingest([
        folder, tmp_path / "nowhere", str(folder / "picture.png"),
        Document("", "no id"), Document("e", "  "), Document("m", "text", {"x": float("nan")}),
        Document("k", "text", {1: "x"}), Document("n", "a\0b"), Document("s", "a\ud800b"),
        Document("good", "Mora has a club."), Document("good", "Mora has a bridge."),
        Document(str(folder / "a.md"), "again"),
    ])  # fmt: skip
    added = [*(str(folder / name) for name in ("a.md", "b.txt", "sub/c.html")), "good", "x"]
    assert sorted(report.added) == added
    assert report.skipped == [folder / ".hidden.txt", folder / "picture.png"]
    reasons = [(failure.source.rpartition("/")[2], type(failure.error)) for failure in report.failed]
    assert sorted(reasons, key=str) == sorted([
        ("bad.txt", ReaderError), ("empty.md", ReaderError), ("nowhere", ReaderError), ("picture.png", ReaderError),
        ("", IngestError), ("e", ReaderError), ("m", MetadataError), ("k", MetadataError), ("n", ReaderError),
        ("s", ReaderError), ("good", DuplicateDocumentError), ("a.md", DuplicateDocumentError),
    ], key=str)  # fmt: skip
    assert kit.texts()["good"] == ["Mora has a club.\n"]
    assert all(str(failure.error) for failure in report.failed)
    kit.check()


def test_a_chunk_too_long_for_the_model_fails_alone(tmp_path, lm):
    with Kit(tmp_path / "kb", lm, max_tokens=600) as kit:
        report = kit.ingestor.ingest([Document("long", "好" * 900), Document("short", "Mora has a club.")])
    assert report.added == ["short"]
    assert isinstance(report.failed[0].error, ContextTooLongError)


def test_a_failure_before_the_commit_leaves_no_block_and_no_document(kit, monkeypatch):
    def full(*_args: object) -> None:
        raise StoreFullError("/: no space left")

    with monkeypatch.context() as patch:
        patch.setattr(kit.documents, "replace_document", full)
        with pytest.raises(StoreFullError):
            kit.ingestor.ingest([Document("a", text_of("Tolvik"))])
    assert kit.ids() == []
    assert list(kit.kv.keys()) == []
    assert kit.ingestor.ingest([Document("a", text_of("Tolvik"))]).added == ["a"]
    kit.check()


def test_a_delete_cut_short_is_finished_by_the_next_run(kit, tmp_path, monkeypatch):
    kit.ingestor.ingest([Document("a", text_of("Tolvik")), Document("b", text_of("Osby"))])
    (vector,) = kit.retriever.index.vectors_present(np.array([kit.documents.chunks_of("a")[0].vector_id]))[1]

    def interrupt(_key: str) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(kit.kv, "delete", interrupt)
        with pytest.raises(KeyboardInterrupt):
            kit.ingestor.delete(["a"])
    kit.check()
    assert kit.ids() == ["b"]
    assert set(kit.kv.keys()) > kit.documents.handles()
    kit.ingestor.ingest([])
    assert set(kit.kv.keys()) == kit.documents.handles()
    assert vector.tobytes() not in (tmp_path / "kb" / "index.faiss").read_bytes()


@pytest.mark.parametrize(("stage", "at"), covering(["read", "encode", "embed", "commit"], [1, 2, 4]))
def test_an_interrupt_leaves_a_good_store_and_the_next_run_finishes(tmp_path, lm, stage, at):
    inputs = [Document(f"d{n}", text_of(f"Town{n}", 3)) for n in range(6)]

    def interrupt(event) -> None:
        if event.stage == stage and event.done >= at:
            raise KeyboardInterrupt

    with Kit(tmp_path / "kb", lm) as kit:
        with pytest.raises(KeyboardInterrupt):
            kit.ingestor.ingest(inputs, progress=interrupt)
        kit.check()
        visible = kit.ids()
        report = kit.ingestor.ingest(inputs)
        assert sorted(report.unchanged) == visible
        assert len(kit.ids()) == 6
        assert set(kit.kv.keys()) == kit.documents.handles()
        kit.check()
    assert threading.active_count() < 20


def test_progress_rises_to_its_total(kit, folder):
    events = []
    kit.ingestor.ingest([folder, Document("more", text_of("Lund"))], progress=events.append)
    for stage in ("read", "embed", "encode", "commit"):
        done = [event.done for event in events if event.stage == stage]
        assert done == sorted(done)
        last = [event for event in events if event.stage == stage][-1]
        assert last.done == last.total > 0
    assert all(event.done <= event.total for event in events)


def test_a_second_writer_waits_and_then_gives_up(kit, folder, tmp_path):
    holder = StoreLayout(tmp_path / "kb")
    taken, release = threading.Event(), threading.Event()

    def hold() -> None:
        with holder.writer():
            taken.set()
            release.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    taken.wait()
    started = time.monotonic()
    with pytest.raises(StoreBusyError, match="kb"):
        kit.ingestor.ingest([folder], timeout_s=0.1)
    with pytest.raises(StoreBusyError):
        kit.ingestor.delete(["x"], timeout_s=0)
    assert time.monotonic() - started >= 0.1
    threading.Timer(0.1, release.set).start()
    assert len(kit.ingestor.ingest([folder], timeout_s=30).added) == 4
    thread.join()


def test_two_ingestions_at_once_both_end_well(tmp_path, lm):
    def added(name: str) -> int:
        with Kit(tmp_path / "kb", lm) as kit:
            inputs = [Document(f"{name}{n}", text_of(f"{name}{n}", 2)) for n in range(5)]
            return len(kit.ingestor.ingest([*inputs, Document("same", "Mora has a club.")]).added)

    assert sorted(at_once(partial(added, "a"), partial(added, "b"))) == [5, 6]
    with Kit(tmp_path / "kb", lm) as kit:
        assert len(kit.ids()) == 11
        kit.check()


PAGED = text_of("Tolvik", 6)
PLACES = [Place(0, {"page": 0, "page_label": "i"}), Place(len(PAGED) // 2, {"page": 1, "page_label": "ii"})]


def test_places_change_no_text_token_block_or_vector(kit, tmp_path, lm):
    with Kit(tmp_path / "other", lm) as other:
        for one, places in ((kit, []), (other, PLACES)):
            one.ingestor.ingest([Document("a", PAGED.replace("\n", "\r\n"), places=places)])
        plain, placed = kit.documents.chunks_of("a"), other.documents.chunks_of("a")
        assert [(one.text, one.token_ids, one.handle) for one in plain] == [
            (one.text, one.token_ids, one.handle) for one in placed
        ]
        vectors = [one.documents.vectors([chunk.id for chunk in plain], one.embedder.dimension) for one in (kit, other)]
        assert np.array_equal(*vectors)
        assert (placed[0].metadata["page"], placed[-1].metadata["page"]) == (0, 1)
        assert other.documents.vector_ids({"page": 1})


def test_a_document_whose_places_alone_change_is_replaced_and_keeps_its_kv(kit):
    kit.ingestor.ingest([Document("a", PAGED, {"year": 1901})])
    before, read = kit.documents.chunks_of("a"), kit.encoder.tokens
    placed = Document("a", PAGED, {"year": 1901}, places=PLACES)
    report = kit.ingestor.ingest([placed])
    assert (report.updated, report.unchanged, report.computed_tokens) == (["a"], [], 0)
    after = kit.documents.chunks_of("a")
    assert [(one.handle, one.text) for one in after] == [(one.handle, one.text) for one in before]
    assert {one.metadata["page_label"] for one in after} == {"i", "ii"}
    assert {one.metadata["year"] for one in after} == {1901}
    assert kit.ingestor.ingest([placed]).unchanged == ["a"]
    assert kit.encoder.tokens == read
    kit.check()


def test_a_heading_path_names_the_section_that_a_passage_begins_in(kit):
    kit.ingestor.ingest(
        [Document("a", f"# Towns\n\n## Tolvik\n\n{'Tolvik has a mill. ' * 20}\n\n## Osby\n\nOsby is small.")]
    )
    paths = [chunk.metadata["headings"] for chunk in kit.documents.chunks_of("a")]
    assert paths[0] == paths[1] == ["Towns", "Tolvik"]
    assert paths[-1] == ["Towns", "Osby"]


def test_the_embedder_reads_titles_and_headings_that_a_chunk_lacks(kit, monkeypatch):
    seen: list[str] = []
    embed = kit.embedder.embed
    monkeypatch.setattr(kit.embedder, "embed", lambda texts: seen.extend(texts) or embed(texts))
    kit.ingestor.ingest([Document("a", text_of("Tolvik", 6), title="Towns"), Document("b", "# Osby\n\nOsby is small.")])
    assert seen[0].startswith("Towns\n# Tolvik\n")
    assert all(text.startswith("Towns > Tolvik\n") for text in seen[1:-1])
    assert seen[-1] == "# Osby\n\nOsby is small.\n"
    assert json.dumps(kit.documents.chunks_of("a")[1].metadata) == '{"headings": ["Tolvik"]}'
