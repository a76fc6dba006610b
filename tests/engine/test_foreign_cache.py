"""KV of passages that are in no store: kept on disk within a budget, found again in any prompt, after a restart too."""

import logging
import sqlite3
from dataclasses import replace

import forked
import pytest
import torch
from engine_texts import TEXTS
from tiny_model import save_tiny_llama

import ragcache as rc
from ragcache.errors import ConfigError

ONE = rc.Sampling(max_tokens=4)
MINE = [
    "The lighthouse of Brenholm was built of oak, and burnt down in a night of May.\n",
    "A ferry goes from Brenholm to the island every second hour, but not on Sundays.\n",
]
TEXT = "Read this.\n\n" + "\n".join(MINE) + "\nWhere does the ferry go?"


@pytest.fixture
def open_kb(open_kb):
    """Blocks are loaded, however quickly a tiny model computes them."""

    def open_one(store=None, **options):
        return open_kb(store=replace(store or rc.StoreConfig(), load="always"), **options)

    return open_one


def kvs(answer):
    return [hit.kv for hit in answer.hits]


def given(kb, **options):
    return kb.complete([*map(rc.Passage, MINE), "Where does the ferry go?"], sampling=ONE, **options)


def as_text(kb, text=TEXT, **options):
    return kb.complete(text, sampling=ONE, **options)


def test_passages_of_no_document_outlive_the_process(open_kb):
    with open_kb() as kb:
        assert as_text(kb).hits == []
        assert kvs(given(kb)) == ["computed", "computed"]
        first = as_text(kb)
        assert kvs(first) == ["memory", "memory"]
    with open_kb() as kb:
        again = as_text(kb)
        assert kvs(again) == ["disk", "disk"]
        assert (again.text, again.usage.prompt_tokens) == (first.text, first.usage.prompt_tokens)
        assert kvs(given(kb)) == ["disk", "disk"]
        assert kb.info().chunks == 0


@pytest.mark.parametrize("codec", ["raw", "int8"])
def test_what_the_disk_gives_back_is_what_the_first_answer_read(open_kb, codec):
    store = rc.StoreConfig(codec=codec)
    with open_kb(store=store) as kb:
        given(kb)
        (key,) = kb._parts.names.keys([hit.chunk for hit in given(kb).hits][:1])
        held = kb.store.kv.get(key).block
    with open_kb(store=store) as kb:
        loaded = kb.store.kv.get(key)
        assert loaded.tier == "disk"
        assert all(torch.equal(loaded.block.layer_keys(n), held.layer_keys(n)) for n in range(held.num_layers))
        assert all(torch.equal(loaded.block.layer_values(n), held.layer_values(n)) for n in range(held.num_layers))


def test_zero_keeps_none(open_kb):
    off = rc.StoreConfig(foreign_cache=0)
    with open_kb(store=off) as kb:
        given(kb)
        assert not kb.store.layout.foreign.exists()
    with open_kb(store=off) as kb:
        assert as_text(kb).hits == []
        assert kvs(given(kb)) == ["computed", "computed"]
    with pytest.raises(ConfigError, match="foreign_cache"):
        rc.StoreConfig(foreign_cache=-1)


def test_the_budget_holds_and_evicted_passages_are_text(open_kb):
    with open_kb() as kb:
        given(kb)
        size = sum(path.stat().st_size for path in kb.store.layout.foreign.rglob("*") if path.is_file())
        blocks = kb.store.kv.foreign.stats().bytes_by_tier["disk"]
        assert blocks <= size
    with open_kb(path=kb.store.layout.root.parent / "small", store=rc.StoreConfig(foreign_cache=blocks - 1)) as kb:
        given(kb)
        assert kb.store.kv.foreign.stats().bytes_by_tier["disk"] < blocks
        kb.store.kv.refresh()
        assert len(as_text(kb, TEXT + " " + TEXTS["cats"] * 3).hits) <= 1
        numbers = [number for number, _ in kb.store.kv.passages.passages(kb._parts.names.owner)]
        assert len(numbers) == 1


def test_tenants_and_other_models_find_nothing(open_kb, tmp_path):
    with open_kb() as kb:
        given(kb)
    with open_kb(tenant="other") as kb:
        assert as_text(kb).hits == []
        assert kvs(given(kb)) == ["computed", "computed"]
    with open_kb(recipe=rc.Recipe(bos=True)) as kb:
        assert as_text(kb).hits == []
    # A cache that was carried to a store of another model: names and owners differ.
    other = rc.load_lm(save_tiny_llama(tmp_path / "lm", seed=5))
    with open_kb(path=tmp_path / "other", model=other, method="reposition") as kb:
        kb.close()
    (tmp_path / "kb" / "foreign").rename(tmp_path / "other" / "foreign")
    with open_kb(path=tmp_path / "other", model=other, method="reposition") as kb:
        assert as_text(kb).hits == []
        assert kvs(given(kb)) == ["computed", "computed"]


def test_a_damaged_block_is_dropped_and_computed(open_kb, caplog):
    with open_kb() as kb:
        given(kb)
        expected = as_text(kb).text
        foreign = kb.store.layout.foreign
    files = [path for path in foreign.rglob("*") if path.is_file() and len(path.stem) == 64]
    assert len(files) == 2
    for path in files:
        data = bytearray(path.read_bytes())
        data[-9] ^= 255
        path.write_bytes(data)
    caplog.set_level(logging.WARNING)
    with open_kb() as kb:
        answer = as_text(kb)
        assert (kvs(answer), answer.text) == (["computed", "computed"], expected)
        assert sum("dropped from disk" in record.getMessage() for record in caplog.records) == 2


def test_a_damaged_list_is_made_anew(open_kb, caplog):
    with open_kb() as kb:
        given(kb)
        path = kb.store.kv.passages.path
    path.write_bytes(b"no database " * 1000)
    with open_kb() as kb:
        assert as_text(kb).hits == []
        assert "damaged" in caplog.text
        for hit in given(kb).hits:
            kb.store.kv.delete(kb._parts.names.key(hit.chunk.token_ids))
        kb.complete([*map(rc.Passage, MINE[::-1]), "Where?"], sampling=ONE)  # in the same order they are shared
        assert len(as_text(kb).hits) == 2


def test_a_deleted_document_leaves_no_bytes(open_kb):
    """A passage that a caller handed over has the name that it has as a document (law 10)."""
    with open_kb() as kb:
        kb.ingest([rc.Document("ferry", MINE[1])], split=False)
        given(kb)
        kb.delete("ferry")
        given(kb)
        foreign = kb.store.kv.foreign
        assert len(list(foreign.keys())) == 2
        kb.ingest([rc.Document("ferry", MINE[1])], split=False)
        kb.delete("ferry")
        assert len(list(foreign.keys())) == len(kb.store.kv.passages.passages(kb._parts.names.owner)) == 1
        assert [hit.chunk.text for hit in as_text(kb, TEXT + " " + MINE[0]).hits] != []


def test_reading_alone_writes_nothing(open_kb):
    with open_kb() as kb:
        kb.ingest(rc.Document(id, text) for id, text in TEXTS.items())
    with open_kb(store=rc.StoreConfig(read_only=True)) as kb:
        given(kb)
        assert not kb.store.layout.foreign.exists()
        assert as_text(kb).hits == []


FILL = """
import sys
from ragcache.store.kv_store import KVStore
import torch
from ragcache.kv.block import KVBlock
root = __import__("pathlib").Path(sys.argv[1])
cache = KVStore(root / "kv", foreign=KVStore(root, memory_bytes=0, disk_bytes=1 << 20))
for number in range(40):
    block = KVBlock(torch.full((2, 2, 9, 4), float(number)), torch.zeros(2, 2, 9, 4))
    cache.keep_foreign(f"{number:064x}", block, "me", [number] * 9)
cache.close()
"""


def test_two_processes_fill_one_cache(tmp_path):
    with forked.Forked(FILL, tmp_path / "foreign") as one, forked.Forked(FILL, tmp_path / "foreign") as other:
        assert (one.wait(), other.wait()) == (0, 0)
    with sqlite3.connect(tmp_path / "foreign" / "passages.sqlite3") as database:
        rows = database.execute("SELECT handle FROM passages ORDER BY handle").fetchall()
    database.close()
    assert [int(handle, 16) for (handle,) in rows] == list(range(40))
