"""The basis of a codec: made at the first ingestion, kept, found again, refused if there are too few tokens."""

import shutil
from pathlib import Path

import pytest
from kit.makers import tiny_lm
from safetensors import safe_open

import ragcache as rc
from ragcache.errors import BasisError
from ragcache_demo.bag_of_words import BagOfWords

SHORT = rc.Sampling(max_tokens=4)
CONFIG = rc.StoreConfig(codec="kvtc")


lm = tiny_lm()
"""A model with two layers of two KV heads of 8: 32 features, so a basis needs 64 tokens (bytes here)."""


def open_kb(path: Path, lm: rc.LanguageModel) -> rc.RagCache:
    return rc.RagCache.open(path, model=lm, method="reposition", embedder=BagOfWords(), store=CONFIG)


def texts(*towns: str) -> list[rc.Document]:
    return [rc.Document(town, f"{town} has a mill by the river, an old bridge and a market hall.") for town in towns]


def codecs(kb: rc.RagCache, *ids: str) -> set[str]:
    handles = {chunk.handle for id in ids for chunk in kb.chunks_of(id)}
    files = [path for path in kb.store.kv.root.rglob("*.safetensors") if path.stem in handles]
    return {safe_open(path, "pt").metadata()["codec"] for path in files}


def test_the_first_ingestion_makes_the_basis_and_later_ones_use_it(lm: rc.LanguageModel, tmp_path: Path) -> None:
    with open_kb(tmp_path / "kb", lm) as kb:
        kb.ingest(texts("Osby", "Lund", "Mora", "Tolvik"))
        name = str(kb.store.documents.properties()["basis"])
        assert name in kb.store.kv.pinned
        assert codecs(kb, "Osby", "Lund", "Mora", "Tolvik") == {"kvtc"}
        answer = kb.ask("Who has a mill?", k=2, sampling=SHORT).text
        report = kb.doctor()
        assert report.sound
        assert name in kb.store.kv
    with open_kb(tmp_path / "kb", lm) as kb:
        kb.ingest(texts("Vik"))
        assert kb.store.documents.properties()["basis"] == name
        assert codecs(kb, "Vik") == {"kvtc"}
        kb.delete("Vik")
        found = kb.ask("Who has a mill?", k=2, sampling=SHORT)
        assert found.text == answer
        assert {hit.kv for hit in found.hits} == {"disk"}
        kb.delete(["Osby", "Lund", "Mora", "Tolvik"])
        assert list(kb.store.kv.keys()) == [name], "blocks go with their documents, the basis stays"


def test_too_few_tokens_are_refused_and_enough_are_taken_later(lm: rc.LanguageModel, tmp_path: Path) -> None:
    with open_kb(tmp_path / "kb", lm) as kb:
        with pytest.raises(BasisError, match=r"needs 64 tokens, .*ingest more passages at once, or use another codec"):
            kb.ingest(texts("Osby"))
        assert not kb.documents()
        assert kb.store.kv.lacks_basis
        kb.ingest(texts("Osby", "Lund"))
        assert codecs(kb, "Osby", "Lund") == {"kvtc"}


def test_a_question_before_there_is_a_basis_keeps_raw_kv(lm: rc.LanguageModel, tmp_path: Path) -> None:
    with open_kb(tmp_path / "kb", lm) as kb:
        kb.ingest(texts("Osby", "Lund"), kv="lazy")
        kb.ask("Who has a mill?", k=1, sampling=SHORT)
        assert codecs(kb, "Osby", "Lund") == {"raw"}
        kb.ingest(texts("Mora", "Tolvik"))
        assert codecs(kb, "Osby", "Lund") == {"raw"}
        assert codecs(kb, "Mora", "Tolvik") == {"kvtc"}


def test_a_process_that_was_open_before_takes_the_others_basis(lm: rc.LanguageModel, tmp_path: Path) -> None:
    with open_kb(tmp_path / "kb", lm) as first, open_kb(tmp_path / "kb", lm) as second:
        second.ingest(texts("Osby", "Lund"))
        assert first.store.kv.lacks_basis
        first.ingest(texts("Mora"))
        assert not first.store.kv.lacks_basis
        assert codecs(first, "Mora") == {"kvtc"}
        assert len(list(first.store.kv.keys())) == 4, "three passages and one basis"


def test_a_cluster_is_given_a_basis_and_makes_none(lm: rc.LanguageModel, tmp_path: Path) -> None:
    with open_kb(tmp_path / "kb", lm) as kb, pytest.raises(BasisError, match="ingest some documents without one first"):
        kb.ingest(texts("Osby", "Lund"), ray=True)


def test_another_machine_reads_blocks_and_basis_from_the_remote(lm: rc.LanguageModel, tmp_path: Path) -> None:
    config = rc.StoreConfig(codec="kvtc", database=f"sqlite:///{tmp_path}/db", remote=f"file://{tmp_path}/remote")
    (tmp_path / "remote").mkdir()
    answers = []
    for machine in ("one", "two"):
        if machine == "two":  # stores that share a remote share their key
            (tmp_path / "two").mkdir()
            shutil.copy2(tmp_path / "one" / "ragcache.key", tmp_path / "two")
        with rc.RagCache.open(
            tmp_path / machine, model=lm, method="reposition", embedder=BagOfWords(), store=config
        ) as kb:
            if machine == "one":
                kb.ingest(texts("Osby", "Lund", "Mora"))
            answers.append(kb.ask("Who has a mill?", k=2, sampling=SHORT))
    assert {hit.kv for hit in answers[1].hits} == {"remote"}
    assert answers[1].text == answers[0].text
