"""A server whose database or remote goes away."""

import pytest
from engine_texts import TEXTS
from postgres_server import postgres_schema
from serving import serving
from sqlalchemy import event

import ragcache as rc
from ragcache.errors import StoreUnreachableError
from ragcache_demo.bag_of_words import BagOfWords


@pytest.fixture
def kb_on_postgres(lm, tmp_path):
    for url in postgres_schema():
        config = rc.StoreConfig(database=url)
        with rc.RagCache.open(
            tmp_path / "kb", model=lm, method="reposition", embedder=BagOfWords(), store=config
        ) as kb:
            kb.ingest(rc.Document(id, text) for id, text in TEXTS.items())
            yield kb


def test_a_lost_database_is_unavailable_until_it_is_back(kb_on_postgres, caplog):
    """Its connections are closed, and new ones go to a port where nobody listens."""
    engine = kb_on_postgres.store.documents.database._engine

    def elsewhere(_dialect, _record, _arguments, options):
        options |= {"host": "127.0.0.1", "port": 9, "connect_timeout": 2}

    with serving(kb_on_postgres) as served:
        assert served.chat("Where is Southis?", max_tokens=1).status_code == 200
        event.listen(engine, "do_connect", elsewhere)
        engine.dispose()
        lost = [served.chat("Where is Southis?", max_tokens=1) for _ in range(2)]
        ready, alive = served.http.get("/readyz"), served.http.get("/healthz")
        event.remove(engine, "do_connect", elsewhere)
        back = served.chat("Where is Southis?", max_tokens=1)
        ready_again = served.http.get("/readyz")
    for answer in (*lost, ready):
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "store_unavailable")
        assert int(answer.headers["Retry-After"]) >= 1
        assert "127.0.0.1" not in answer.text
    assert "database" in ready.json()["error"]["message"]
    assert (alive.status_code, back.status_code, ready_again.status_code) == (200, 200, 200)
    failures = [record.fields for record in caplog.records if record.getMessage() == "failure"]
    assert failures
    assert failures[0]["request_id"] == lost[0].headers["x-request-id"]
    assert "does not answer" in failures[0]["reason"]


def test_a_lost_remote_at_ingestion_says_when_to_ask_again(kb, monkeypatch):
    def refuse(*_args, **_options):
        raise StoreUnreachableError("redis://host/0: did not answer a moment ago; it is asked again in 8 s", 7.3)

    monkeypatch.setattr(kb.store.kv, "put", refuse)
    body = {"documents": [{"id": "new", "text": "A text of its own."}]}
    with serving(kb) as served:
        answer = served.http.post("/v1/documents", json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "store_unavailable")
        assert answer.headers["Retry-After"] == "8"
        assert "redis" not in answer.text
        monkeypatch.undo()
        assert served.http.post("/v1/documents", json=body).is_success
