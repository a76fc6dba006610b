"""Law 9: kill -9 an ingesting process at random moments; the store opens, is sound, and the next run finishes."""

import json
import multiprocessing
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import killed
import pytest
import torch
from blocks import garbage_of
from kit.ingestion import Kit


def status_of(act: Callable[..., None], *arguments: object) -> int | None:
    """Act in a child process. Returns its exit status."""
    child = multiprocessing.get_context("fork").Process(target=act, args=arguments)
    child.start()
    child.join()
    return child.exitcode


class Runner:
    """Ingests into copies of one store in child processes."""

    def __init__(self, base: Path, work: Path, lm_directory: Path) -> None:
        self.base, self.work, self.lm_directory = base, work, lm_directory

    def run(self, name: str, at_step: int = -1, delay_s: float = 0.0) -> tuple[Path, tuple[int, float] | None]:
        """Copy the base store and ingest into it; kill -9 that long after that step. Returns the store, and the steps
        and the seconds of an ingestion that came to its end."""
        root, ended = self.work / name, self.work / f"{name}.ended"
        shutil.copytree(self.base, root)
        status = status_of(killed.ingest, root, self.lm_directory, at_step, delay_s, ended)
        assert (status == 0) == ended.exists(), status
        return root, tuple(json.loads(ended.read_text())) if ended.exists() else None


@pytest.fixture(scope="module")
def runner(lm, lm_directory, tmp_path_factory) -> Runner:
    base = tmp_path_factory.mktemp("base") / "kb"
    with Kit(base, lm) as kit:
        kit.ingestor.ingest(killed.version_one())
    return Runner(base, tmp_path_factory.mktemp("runs"), lm_directory)


@pytest.fixture(scope="module")
def finished(runner) -> tuple[Path, int, float]:
    """An ingestion that nobody interrupted, its steps and its seconds."""
    root, ended = runner.run("finished")
    assert ended is not None
    return root, *ended


def versions_of(kit: Kit, documents: list) -> dict[str, list[list[str]]]:
    """The chunk texts that a document may have, by id."""
    allowed: dict[str, list[list[str]]] = {}
    for document in documents:
        allowed.setdefault(document.id, []).append([chunk.text for chunk in kit.chunker.split(document.text)])
    return allowed


def assert_sound(kit: Kit) -> None:
    """Whole documents of one version or the other, every block whole, the index equal to SQL."""
    kit.check()
    allowed = versions_of(kit, [*killed.version_one(), *killed.version_two()])
    texts = kit.texts()
    assert {document.id for document in killed.version_one()} <= set(texts)
    for id, chunks in texts.items():
        assert chunks in allowed[id]
    assert {hit.chunk.document_id for hit in kit.retriever.retrieve("Town mill", 10_000)} == set(texts)


def assert_equal(kit: Kit, other: Kit) -> None:
    """Both stores hold the same documents, chunks, handles, embeddings and blocks, and nothing else."""
    assert kit.texts() == other.texts()
    for id in kit.ids():
        assert kit.documents.document(id).metadata == other.documents.document(id).metadata
        assert kit.documents.document(id).content_hash == other.documents.document(id).content_hash
        for one, two in zip(kit.documents.chunks_of(id), other.documents.chunks_of(id), strict=True):
            assert (one.token_ids, one.handle) == (two.token_ids, two.handle)
            ours, theirs = kit.kv.get(one.handle).block, other.kv.get(two.handle).block
            torch.testing.assert_close(ours.keys, theirs.keys, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(ours.values, theirs.values, atol=1e-5, rtol=1e-5)
    assert set(kit.kv.keys()) == set(other.kv.keys()) == kit.documents.handles()
    assert garbage_of(kit.documents) == set()


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("times", [3, pytest.param(200, marks=pytest.mark.slow)])
def test_kills_at_random_moments(runner, finished, lm, times):
    """Each a random time behind a step, and the steps spread from the first to the last, however fast it runs."""
    rng, visible = random.Random(times), []
    whole, steps, seconds = finished
    with Kit(whole, lm) as other:
        for round in range(times):
            at_step, delay_s = round * (steps - 1) // (times - 1), rng.uniform(0, 2 * seconds / steps)
            root, _ = runner.run(f"kill-{times}-{round}", at_step, delay_s)
            with Kit(root, lm) as kit:
                assert_sound(kit)
                visible.append(len([d for d in kit.documents.documents() if d.metadata["version"] == 2]))
                report = kit.ingestor.ingest(killed.version_two())
                assert not report.failed
                assert len(report.unchanged) == 2 + visible[-1]
                assert_sound(kit)
                assert_equal(kit, other)
            shutil.rmtree(root)
    # Some kills found nothing of it committed, some a part, some all or most.
    assert len(set(visible)) >= 3, visible


def test_a_store_killed_again_and_again_gets_there(runner, finished, lm, lm_directory):
    """The same store, killed each time as far behind its beginning: every run goes on where the last one stopped."""
    root, (whole, steps, _) = runner.base, finished
    for round in range(5):
        root, ended = Runner(root, runner.work, lm_directory).run(f"again-{round}", steps // 3)
        with Kit(root, lm) as kit:
            assert_sound(kit)
        if ended is not None:
            break
    with Kit(root, lm) as kit, Kit(whole, lm) as other:
        kit.ingestor.ingest(killed.version_two())
        assert_equal(kit, other)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("stride", "neighbours"), [(25, 2), *(pytest.param(1, neighbours, marks=pytest.mark.slow) for neighbours in (0, 2))]
)
def test_a_sync_killed_at_any_step_finishes_when_run_again(lm, lm_directory, tmp_path, stride, neighbours):
    """Every document is whole and of one version or the other; nothing but what vanished is ever missing."""
    folder, base, work = tmp_path / "docs", tmp_path / "base", tmp_path / "work"
    folder.mkdir()
    killed.write_folder(folder, 1)
    with Kit(base, lm, neighbours=neighbours) as kit:
        kit.ingestor.ingest([folder])
    killed.write_folder(folder, 2)
    for steps in range(1, 200, stride):
        shutil.copytree(base, work)
        status = status_of(killed.sync, work, lm_directory, folder, steps, neighbours)
        with Kit(work, lm, neighbours=neighbours) as kit:
            kit.check()
            assert all(town in str(kit.texts()) for town in ("Town2 ", "Town3 ")), "these only move"
            report = kit.ingestor.ingest([folder], sync=True)
            assert not report.failed
            assert kit.ids() == [str(folder / f"{name}.md") for name in ("changed", "new", "renamed", "under")]
            assert not {name for name in ("Town1 ", "Town4 ", "Town5 ") if name in str(kit.texts())}
            kit.check()
            assert (set(kit.kv.keys()), garbage_of(kit.documents)) == (kit.documents.handles(), set())
        shutil.rmtree(work)
        if status == 0:
            break
    assert (status, steps > 15) == (0, True)
