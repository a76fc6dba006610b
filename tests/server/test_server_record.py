"""`ragcache record`'s log: what a server writes of its chat requests, and what it does not."""

import pytest
from engine_texts import TEXTS

from ragcache.errors import TraceError
from ragcache.server.record import RequestLog
from ragcache_plan.logs import read_log

MESSAGES = [
    {"role": "system", "content": "Answer briefly."},
    {"role": "user", "content": "Where is the first cat?"},
    {"role": "assistant", "content": "At home."},
    {"role": "user", "content": "Which rivers are long?"},
]


def test_chat_requests_are_logged_by_hash_and_length(serve, kb, tmp_path):
    path = tmp_path / "log.jsonl"
    served = serve(record=path)
    for _ in range(2):
        body = {"model": served.service.chat_model, "messages": MESSAGES, "max_tokens": 3}
        assert served.http.post("/v1/chat/completions", json=body).status_code == 200
    first, second = read_log(path)
    assert [part.kind for part in first.parts if part.kind != "passage"] == [
        "system", "history", "history", "question"
    ]  # fmt: skip
    assert first.parts == second.parts, "equal texts have equal hashes"
    assert first.at <= second.at
    passages = [part for part in first.parts if part.kind == "passage"]
    known = {hit.handle: len(hit.chunk.token_ids) for hit in kb.retrieve("Which rivers are long?", k=4)}
    assert passages
    assert all(known.get(part.hash) == part.num_tokens for part in passages)
    text = path.read_text()
    assert not any(word in text for word in ("river", "cat", "briefly", *TEXTS.values()))
    assert path.stat().st_mode & 0o777 == 0o600


def test_two_logs_hash_a_text_differently(tmp_path):
    one, other = (RequestLog(tmp_path / name, len) for name in ("a", "b"))
    assert one._hash("What is it?") != other._hash("What is it?")
    one.close()
    other.close()


def test_a_log_that_cannot_be_opened_is_named(tmp_path):
    with pytest.raises(TraceError, match="cannot be written"):
        RequestLog(tmp_path, len)


def test_a_full_disk_ends_the_log_and_not_the_answers(serve, monkeypatch, caplog, tmp_path):
    served = serve(record=tmp_path / "log.jsonl")

    def full(*_given):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ragcache.server.record.os.write", full)
    for _ in range(2):
        assert served.chat("Where do dogs bark?", max_tokens=2).status_code == 200
    assert [record.getMessage() for record in caplog.records if "the log ends here" in record.getMessage()] == [
        f"{tmp_path / 'log.jsonl'}: the log ends here, since it cannot be written (No space left on device)"
    ]
