"""Documents follow their files: two folders, other names, renames, removals."""

import json
import os
import shutil
from pathlib import Path

import pytest
from kit.ingestion import Kit
from random_texts import text_of

from ragcache.errors import ConfigError, DuplicateDocumentError, ReaderError
from ragcache.ingest import ingest_run as run
from ragcache.ingest.document import Document
from ragcache.ingest.report import Moved


@pytest.fixture
def docs(tmp_path) -> Path:
    """a.md, b.md, sub/c.md, and two records; each with words of its own."""
    path = tmp_path / "docs"
    (path / "sub").mkdir(parents=True)
    for name, town in {"a.md": "Tolvik", "b.md": "Mora", "sub/c.md": "Lund"}.items():
        (path / name).write_text(text_of(town))
    write_records(path / "d.jsonl", {"id": "x", "text": "Vik has a bridge."}, {"text": "Vik has a mill."})
    return path


def write_records(path: Path, *records: dict) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def costs(kit: Kit) -> tuple[int, int]:
    return kit.encoder.tokens, kit.embedder.texts


def content(kit: Kit) -> dict:
    return {
        id: [(chunk.id, chunk.text, chunk.handle, chunk.vector_id) for chunk in kit.documents.chunks_of(id)]
        for id in kit.ids()
    }


def files_in(root: Path) -> dict[str, bytes]:
    return {
        str(path): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file() and "-shm" not in path.name
    }


# Ids


def test_records_of_two_files_with_one_id_are_an_error_that_names_both(kit, docs):
    write_records(docs / "e.jsonl", {"id": "x", "text": "Another."}, {"id": "y", "text": "Its own."})
    for _ in range(2):
        report = kit.ingestor.ingest([docs / "d.jsonl"])
        assert not report.failed
        report = kit.ingestor.ingest([docs / "e.jsonl"])
        (failure,) = report.failed
        assert isinstance(failure.error, DuplicateDocumentError)
        assert str(docs / "d.jsonl") in str(failure.error)
        assert str(docs / "e.jsonl") in str(failure.error)
    assert kit.texts()["x"] == ["Vik has a bridge.\n"]
    (docs / "d.jsonl").unlink()
    assert kit.ingestor.ingest([docs / "e.jsonl"]).updated == ["x"]


# Sync


def test_sync_removes_what_vanished_and_follows_renames_without_work(kit, docs):
    kit.ingestor.ingest([docs])
    before, cost = content(kit), costs(kit)
    (docs / "a.md").unlink()
    (docs / "b.md").rename(docs / "sub" / "renamed.md")
    write_records(docs / "d.jsonl", {"text": "Vik has a mill."})
    report = kit.ingestor.ingest([docs], sync=True)
    assert report.moved == [Moved(str(docs / "b.md"), str(docs / "sub" / "renamed.md"))]
    assert sorted(report.removed) == [str(docs / "a.md"), f"{docs}/d.jsonl#2", "x"]
    assert report.added == [f"{docs}/d.jsonl#1"]
    assert kit.ids() == [f"{docs}/d.jsonl#1", str(docs / "sub" / "c.md"), str(docs / "sub" / "renamed.md")]
    moved = content(kit)[str(docs / "sub" / "renamed.md")]
    assert [chunk[1:] for chunk in moved] == [chunk[1:] for chunk in before[str(docs / "b.md")]]
    assert costs(kit) == (cost[0], cost[1] + 1), "the record that moved up a line"
    assert kit.retriever.retrieve("Mora mill", 1)[0].chunk.source == str(docs / "sub" / "renamed.md")
    kit.check()
    assert set(kit.kv.keys()) == kit.documents.handles()


def test_a_rename_alone_costs_nothing(kit, docs):
    kit.ingestor.ingest([docs])
    cost, handles = costs(kit), kit.documents.handles()
    (docs / "sub").rename(docs / "other")
    (docs / "d.jsonl").rename(docs / "e.jsonl")
    report = kit.ingestor.ingest([docs], sync=True)
    assert sorted(report.moved) == [
        Moved(f"{docs}/d.jsonl#2", f"{docs}/e.jsonl#2"), Moved(str(docs / "sub/c.md"), str(docs / "other/c.md"))
    ]  # fmt: skip
    assert (report.updated, report.removed, report.added, report.computed_tokens) == (["x"], [], [], 0)
    assert (costs(kit), kit.documents.handles()) == (cost, handles)
    assert kit.documents.document("x").source == f"{docs}/e.jsonl:1"
    assert kit.ingestor.ingest([docs], sync=True).removed == []
    kit.check()


def test_a_rename_onto_a_file_that_was_there_replaces_its_document(kit, docs):
    kit.ingestor.ingest([docs])
    cost = costs(kit)
    (docs / "b.md").replace(docs / "a.md")
    report = kit.ingestor.ingest([docs], sync=True)
    assert report.moved == [Moved(str(docs / "b.md"), str(docs / "a.md"))]
    assert (report.updated, report.removed, costs(kit)) == ([], [], cost)
    assert "Mora has" in kit.texts()[str(docs / "a.md")][0]
    kit.check()
    assert set(kit.kv.keys()) == kit.documents.handles()


def test_sync_touches_only_documents_of_files_under_the_given_folders(kit, docs, tmp_path):
    other = tmp_path / "docs-too"
    shutil.copytree(docs / "sub", other)
    kit.ingestor.ingest([docs, other, Document("object", "An object."), Document(f"{docs}/upload.md", "An upload.")])
    (docs / ".hidden.md").write_text(text_of("Hidden"))
    kit.ingestor.ingest([docs / ".hidden.md"])
    before = kit.ids()
    shutil.rmtree(other)
    assert kit.ingestor.ingest([docs], sync=True).removed == []
    shutil.rmtree(docs / "sub")
    report = kit.ingestor.ingest([docs], sync=True)
    assert report.removed == [str(docs / "sub" / "c.md")]
    assert kit.ids() == [id for id in before if id not in report.removed]


@pytest.fixture
def linked(docs, tmp_path) -> Path:
    """docs/link.md leads to other/far.md, and tmp/current to releases/1; release 2 has a changed and an equal file."""
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "far.md").write_text(text_of("Osby"))
    (docs / "link.md").symlink_to(tmp_path / "other" / "far.md")
    for release, town in (("1", "Rome"), ("2", "Oslo")):
        (tmp_path / "releases" / release).mkdir(parents=True)
        (tmp_path / "releases" / release / "manual.md").write_text(text_of(town))
        (tmp_path / "releases" / release / "same.md").write_text(text_of("Paris"))
        write_records(tmp_path / "releases" / release / "r.jsonl", {"id": "r", "text": f"Release {release}."})
    (tmp_path / "current").symlink_to(tmp_path / "releases" / "1")
    return tmp_path


def test_sync_removes_what_a_link_led_to(kit, docs, linked):
    roots = [docs, linked / "current"]
    kit.ingestor.ingest(roots, sync=True)
    first, second = linked / "releases" / "1", linked / "releases" / "2"
    (docs / "link.md").unlink()
    (linked / "current").unlink()
    (linked / "current").symlink_to(second)
    told = kit.ingestor.ingest(roots, sync=True, dry_run=True)
    report = kit.ingestor.ingest(roots, sync=True)
    assert (
        sorted(report.removed) == sorted(told.removed) == [str(linked / "other" / "far.md"), str(first / "manual.md")]
    )
    assert report.moved == [Moved(str(first / "same.md"), str(second / "same.md"))]
    assert (report.added, report.updated, report.failed) == ([str(second / "manual.md")], ["r"], [])
    kit.check()
    assert kit.ingestor.ingest(roots, sync=True).removed == []


def test_sync_keeps_what_a_link_was_not_the_only_way_to(kit, docs, linked):
    kit.ingestor.ingest([docs])
    kit.ingestor.ingest([linked / "other"])
    (docs / "again.md").symlink_to(docs / "a.md")
    kit.ingestor.ingest([docs], sync=True)
    before = kit.ids()
    (docs / "link.md").unlink()
    (docs / "again.md").unlink()
    assert kit.ingestor.ingest([docs], sync=True).removed == []
    assert kit.ids() == before


def test_sync_removes_what_a_link_leads_to_when_that_has_gone(kit, docs, linked):
    kit.ingestor.ingest([docs])
    (linked / "other" / "far.md").unlink()
    assert kit.ingestor.ingest([docs], sync=True).removed == [str(linked / "other" / "far.md")]


def test_a_file_that_cannot_be_read_has_not_vanished(kit, docs, monkeypatch):
    kit.ingestor.ingest([docs])
    before = kit.ids()
    (docs / "a.md").write_bytes(b"\0")
    (docs / "d.jsonl").write_text("{\n")
    real = os.lstat

    def refuse(path, *args, **options):
        if str(path).startswith(str(docs / "sub")):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *args, **options)

    shutil.rmtree(docs / "sub")
    with monkeypatch.context() as patch:
        patch.setattr(os, "lstat", refuse)
        report = kit.ingestor.ingest([docs], sync=True)
    assert (report.removed, len(report.failed), kit.ids()) == ([], 2, before)


@pytest.mark.parametrize("how", ["absent", "unreadable", "absent file"])
def test_a_folder_that_is_not_there_or_unreadable_is_refused_before_anything_changes(kit, docs, how, monkeypatch):
    kit.ingestor.ingest([docs])
    before, generation = content(kit), kit.documents.generation()
    (docs / "a.md").unlink()
    (docs / "new.md").write_text(text_of("New"))
    bad = {"absent": docs.parent / "nowhere", "unreadable": docs / "sub", "absent file": docs / "a.md"}[how]
    real = os.scandir

    def refuse(path="."):
        if str(path) == str(docs / "sub"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", refuse if how == "unreadable" else real)
    with pytest.raises(ReaderError, match="nothing was changed") as raised:
        kit.ingestor.ingest([docs, bad], sync=True)
    assert raised.value.path == str(bad)
    assert (content(kit), kit.documents.generation()) == (before, generation)
    with pytest.raises(ConfigError, match="give it one"):
        kit.ingestor.ingest([Document("a", "text")], sync=True)


def test_a_dry_run_says_what_a_run_does_and_changes_nothing(kit, docs):
    kit.ingestor.ingest([docs])
    (docs / "a.md").unlink()
    (docs / "b.md").rename(docs / "z.md")
    (docs / "sub" / "c.md").write_text(text_of("Lund", 6))
    (docs / "new.md").write_text(text_of("New"))
    before, files, cost = content(kit), files_in(kit.layout.root), costs(kit)
    told = kit.ingestor.ingest([docs], sync=True, dry_run=True)
    assert (content(kit), files_in(kit.layout.root), costs(kit)) == (before, files, cost)
    done = kit.ingestor.ingest([docs], sync=True)
    assert (told.dry_run, done.dry_run) == (True, False)
    for field in ("added", "updated", "unchanged", "moved", "removed", "chunks", "tokens", "computed_tokens", "failed"):
        assert getattr(told, field) == getattr(done, field), field
    assert (len(told.added), len(told.updated), len(told.moved), len(told.removed)) == (1, 1, 1, 1)


def test_a_folder_that_vanishes_before_it_is_walked_loses_nothing(kit, docs, monkeypatch):
    kit.ingestor.ingest(docs)
    before = content(kit)
    walk = run.find_files

    def too_late(paths):
        shutil.rmtree(docs, ignore_errors=True)
        return walk(paths)

    monkeypatch.setattr(run, "find_files", too_late)
    report = kit.ingestor.ingest(docs, sync=True)
    assert (report.removed, len(report.failed)) == ([], 1)
    assert content(kit) == before
