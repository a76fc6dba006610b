"""What is kept of KV, and where: the same answers whatever the budgets."""

import pytest
from engine_texts import TEXTS

import ragcache as rc
from ragcache.errors import MissingBlockError, NoSuchDocumentError, PinError

QUESTION = "Where does the Arno rise?"


def documents() -> list[rc.Document]:
    return [rc.Document(id, text) for id, text in TEXTS.items()]


def origins(kb: rc.RagCache, question: str = QUESTION) -> list[str]:
    return [hit.kv for hit in kb.ask(question, k=1, sampling=rc.Sampling(max_tokens=6)).hits]


def block_bytes(kb: rc.RagCache) -> dict[str, int]:
    stats = kb.store.kv.stats()
    return {tier: count // max(1, stats.blocks) for tier, count in stats.bytes_by_tier.items()}


def test_answers_are_the_same_whatever_the_budgets(open_kb, tmp_path) -> None:
    with open_kb(tmp_path / "plain", store=rc.StoreConfig(load="always"), texts=TEXTS) as plain:
        expected = plain.ask(QUESTION, k=3, sampling=rc.Sampling(max_tokens=6))
        one = block_bytes(plain)
    budgets = [
        {"device_bytes": 2 * one["memory"], "memory_bytes": 2 * one["memory"]},
        {"disk_bytes": 2 * one["disk"], "memory_bytes": one["memory"]},
        {"disk_bytes": 0, "memory_bytes": 0},
        {"ttl_s": 3600.0, "memory_bytes": 0, "disk_bytes": 3 * one["disk"]},
    ]
    for number, budget in enumerate(budgets):
        with open_kb(tmp_path / f"kb{number}", store=rc.StoreConfig(load="always", **budget), texts=TEXTS) as kb:
            for _ in range(3):
                answer = kb.ask(QUESTION, k=3, sampling=rc.Sampling(max_tokens=6))
                assert (answer.text, [hit.handle for hit in answer.hits]) == (
                    expected.text,
                    [hit.handle for hit in expected.hits],
                ), budget
            held = kb.info().bytes_by_tier
            assert held["memory"] <= budget["memory_bytes"]
            assert held["disk"] <= budget.get("disk_bytes", 1 << 40)
            assert ("device" in held) == ("device_bytes" in budget)
            assert kb.doctor().sound


def test_pinned_documents_stay_and_are_computed_where_needed(open_kb, tmp_path) -> None:
    with open_kb(tmp_path / "plain", texts=TEXTS) as plain:
        one = block_bytes(plain)["disk"]
    config = rc.StoreConfig(load="always", disk_bytes=int(2.5 * one), memory_bytes=0)
    with open_kb(store=config) as kb:
        kb.ingest(documents(), kv="lazy")
        (key,) = kb.pin("rivers")
        assert kb.info().pinned == 1
        for _ in range(2):
            for id in TEXTS:
                kb.pin([]) if id == "rivers" else kb.ingest(rc.Document(f"{id} more", TEXTS[id] + "And more.\n"))
        assert key in kb.store.kv
        assert origins(kb) == ["disk"]
        with pytest.raises(PinError):
            kb.pin(["cats", "dogs", "clubs"])
        with pytest.raises(NoSuchDocumentError, match="nobody"):
            kb.pin("nobody")
    with rc.Store.open(tmp_path / "kb", store=config) as kb:
        assert kb.info().pinned == 1
        with pytest.raises(MissingBlockError, match=r"no KV yet|no tier has"):
            kb.pin("cats")
        assert kb.unpin("rivers") == [key]
        assert kb.info().pinned == 0
        kb.pin("rivers")
        kb.delete("rivers")
        assert kb.info().pinned == 0
        assert key not in kb.store.kv


def test_evicted_blocks_are_no_fault_to_the_doctor(open_kb, tmp_path) -> None:
    with open_kb(tmp_path / "plain", texts=TEXTS) as plain:
        one = block_bytes(plain)["disk"]
    open_kb(store=rc.StoreConfig(disk_bytes=2 * one), texts=TEXTS).close()
    with open_kb() as kb:  # without the budget: the store remembers that there was one
        report = kb.doctor()
        assert report.sound
        assert report.missing
        assert kb.info().pending == len(report.missing)
