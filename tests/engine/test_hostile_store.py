"""Somebody who may write into a store's folder changes no answer; what is not a passage's KV is computed again."""

import errno
import logging
import os
from contextlib import suppress

import pytest
import torch
from engine_texts import TEXTS
from test_store_laws import ask, block_file, corrupt

import ragcache as rc
from ragcache.errors import ConfigError, StoreFailedError
from ragcache.kv.block import KVBlock


@pytest.mark.parametrize("change", ["bits", "tokens", "layers"])
def test_damaged_kv_and_kv_of_another_shape_is_dropped_and_computed_again(kb, open_kb, change, caplog):
    """Of another shape it is whole and sealed: a bug, or another machine's."""
    expected = ask(kb)
    handle = expected.hits[0].handle
    block = kb.store.kv.get(handle).block
    if change == "bits":
        corrupt(block_file(kb, handle))
    else:
        rows = (slice(None), slice(None), slice(-1)) if change == "tokens" else slice(1, None)
        kb.store.kv._durable.put(handle, KVBlock(block.keys[rows].contiguous(), block.values[rows].contiguous()))
    again = open_kb()
    with caplog.at_level(logging.WARNING):
        answer = ask(again)
    assert answer.text == expected.text
    assert [hit.kv for hit in answer.hits] == ["computed", "disk", "disk", "disk"]
    assert again.store.kv.stats().damaged == 1
    assert (handle if change == "bits" else f"block {handle}") in caplog.text
    again._engine.contexts.clear()
    assert ask(again).hits[0].kv == "memory"
    assert again.doctor().sound
    assert [hit.kv for hit in ask(open_kb()).hits] == ["disk"] * 4, "the right block was stored"


@pytest.mark.parametrize("codec", ["raw", "int8"])
def test_doctor_finds_kv_that_is_not_its_texts(open_kb, tmp_path, codec):
    options = {"store": rc.StoreConfig(codec=codec)}
    kb = open_kb(tmp_path / codec, **options, texts=TEXTS)
    report = kb.doctor(recompute=100)
    assert (report.recomputed, report.different, report.sound) == (len(kb.chunks()), [], True)
    handle = kb.chunks()[0].handle
    block = kb.store.kv.read(handle)
    changed = KVBlock(block.keys.clone(), block.values + 0.2 * torch.rand_like(block.values))
    kb.store.kv._durable.put(handle, changed)
    report = kb.doctor(recompute=100)
    assert (report.different, report.sound) == ([handle], False)
    assert kb.doctor(recompute=2).recomputed == 2
    assert ask(kb).text


def test_doctor_recomputes_nothing_without_a_model(kb, tmp_path):
    kb.close()
    with rc.Store.open(kb.store.layout.root) as store, pytest.raises(ConfigError, match=r"RagCache\.open"):
        store.doctor(recompute=1)


# Failures of the disk


def fail_at(monkeypatch, name, owner, count):
    """Raise EIO at the `count`th call of this function, and at all later ones."""
    real, calls = getattr(owner, name), []

    def failing(*arguments, **options):
        calls.append(name)
        if len(calls) >= count:
            raise OSError(errno.EIO, "Input/output error")
        return real(*arguments, **options)

    monkeypatch.setattr(owner, name, failing)


def test_a_question_whose_block_cannot_be_written_is_answered(kb, open_kb, monkeypatch, caplog):
    expected = ask(kb)
    for hit in expected.hits:
        block_file(kb, hit.handle).unlink()
    again = open_kb()
    fail_at(monkeypatch, "fsync", os, 1)
    answer = ask(again)
    monkeypatch.undo()
    assert (answer.text, {hit.kv for hit in answer.hits}) == (expected.text, {"computed"})
    assert "device fails" in caplog.text
    assert list(again.store.kv.keys()) == []


def test_a_block_whose_chunk_cannot_be_marked_is_no_orphan(open_kb, tmp_path, monkeypatch):
    kb = open_kb(tmp_path / "lazy")
    kb.ingest([rc.Document(id, text) for id, text in TEXTS.items()], kv="lazy")

    def refuse(*_arguments):
        raise StoreFailedError("the device fails")

    monkeypatch.setattr(type(kb.store.documents), "set_handles", refuse)
    assert ask(kb).text
    assert list(kb.store.kv.keys()) == []


@pytest.mark.parametrize("at", [1, 3, 6, 10])
def test_a_failed_ingestion_leaves_no_orphans(open_kb, tmp_path, monkeypatch, at):
    kb = open_kb(tmp_path / "failed")
    fail_at(monkeypatch, "replace", os, at)
    with suppress(StoreFailedError):
        kb.ingest(rc.Document(id, text) for id, text in TEXTS.items())
    monkeypatch.undo()
    named = {chunk.handle for chunk in kb.chunks() if chunk.handle is not None}
    assert set(kb.store.kv.keys()) <= named | kb.store.documents.referenced(kb.store.kv.keys())
    kb.ingest(rc.Document(id, text) for id, text in TEXTS.items())
    assert kb.doctor().sound
