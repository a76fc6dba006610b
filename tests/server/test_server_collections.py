"""Keys of a key file: what each sees and changes on a server that strangers share."""

import json
import logging
import os
from datetime import UTC, datetime, timedelta

import pytest
from engine_texts import TEXTS
from serving import READS, Caller

import ragcache as rc
from ragcache.engine.keys import Key, KeyFile, digest_of, new_secret, read_key_file, write_key_file
from ragcache.errors import ConfigError

QUESTION = "Where does the zebra sleep?"
SECRET = "The zebra password of Kelbrook is quagga, and the zebra sleeps in the tower until the morning bell."
SECRETS = {name: new_secret() for name in ("alice", "bob", "reader", "writer", "nobody", "root", "late")}


def key(id, scopes=("ask", "write"), reads=(), writes=(), **more):
    return Key(id, digest_of(SECRETS[id].encode()), frozenset(scopes), frozenset(reads), frozenset(writes), **more)


KEYS = (
    key("alice", reads=["a", "common"], writes=["a"]),
    key("bob", reads=["b", "common"], writes=["b"]),
    key("reader", ["ask"], ["a"], ["a"]),
    key("writer", ["write"], ["a"], ["a"]),
    key("nobody", ["ask"]),
    key("root", ["ask", "write", "admin"], ["*"], ["*"]),
    key("late", reads=["a"], expires=datetime.now(UTC) - timedelta(seconds=1)),
)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "keys.toml"
    write_key_file(path, KEYS)
    return path


@pytest.fixture
def served(kb, serve, file):
    """A server of the collections a, b, common and default. Each has the document "one"; a's holds a secret."""
    for name, text in (("a", SECRET), ("b", TEXTS["dogs"]), ("common", TEXTS["cats"])):
        kb.collection(name).ingest(rc.Document("one", text, {f"field_{name}": 1}))
    return serve(key_file=file)


def caller(served, id: str) -> Caller:
    return Caller(served, SECRETS[id], QUESTION)


READS = READS | {
    "filter of another": lambda c: c.post("/v1/search", query="Who?", filter={"field_a": 1}).text.replace(
        "field_a", "", 1
    ),
    "documents by id": lambda c: c.send("GET", "/v1/documents?id=o*").text,
    "a document": lambda c: c.send("GET", "/v1/documents/one").text,
}


def test_no_route_shows_a_key_documents_of_another(served):
    alice, bob = caller(served, "alice"), caller(served, "bob")
    for name, read in READS.items():
        mine, theirs = read(alice), read(bob)
        assert "zebra" not in theirs, name
        assert "field_a" not in theirs, name
        if name != "filter of another":
            assert "zebra" in mine or "one" in mine, name
    assert "zebra" in READS["search"](alice)


def test_a_handle_of_another_key_names_nothing(served, kb):
    [chunk] = kb.collection("a").chunks_of("one")
    bob = caller(served, "bob")
    refused = bob.chat("Why?", documents=[{"handle": chunk.handle}])
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "unknown_handle")
    told = bob.chat("Why?", documents=[{"id": chunk.id}]).text
    assert "zebra" not in told
    in_text = bob.chat(f"{SECRET}\nWhy?", retrieve=False).json()["ragcache"]
    assert in_text["sources"] == []


def test_a_key_changes_its_collections_alone(served, kb):
    alice, bob = caller(served, "alice"), caller(served, "bob")
    added = bob.post("/v1/documents", documents=[{"id": "one", "text": "Another text of bob's."}]).json()
    assert (added["updated"], added["failed"]) == (["one"], [])
    assert kb.collection("a").chunks_of("one")[0].text.strip() == SECRET
    assert bob.send("DELETE", "/v1/documents?id=*").json()["deleted"] == ["one"]
    assert bob.send("DELETE", "/v1/documents/one").status_code == 404  # common's is read, not written
    assert json.loads(bob.mcp("delete", ids=["one"]))["unknown"] == ["one"]
    assert [(one.collection, one.id) for one in kb.documents({"document_id": "one"})] == [
        ("a", "one"),
        ("common", "one"),
    ]
    assert alice.send("GET", "/v1/documents?collection=a").json()["total"] == 1


def test_unknown_collections_and_those_of_others_are_told_alike(served):
    bob = caller(served, "bob")
    told = [bob.chat(collection=name) for name in ("a", "never")]
    told += [bob.send("GET", f"/v1/documents?collection={name}") for name in ("a", "never")]
    told += [bob.post("/v1/documents", collection=name, documents=[{"id": "x", "text": "y"}]) for name in ("a", "z")]
    for one in told:
        assert (one.status_code, one.json()["error"]["code"]) == (404, "collection_not_found")
    for one, other in zip(told[::2], told[1::2], strict=True):
        texts = [json.loads(part.text)["error"]["message"].split("'") for part in (one, other)]
        assert texts[0][::2] == texts[1][::2]
    refused = bob.post("/v1/documents", collection="common", documents=[{"id": "x", "text": "y"}])
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "not_allowed")


def test_a_named_collection_is_seen_alone_and_made_by_who_may_write(served, kb):
    root = caller(served, "root")
    new = root.post("/v1/documents", collection="new", documents=[{"id": "n", "text": TEXTS["clubs"]}])
    assert new.json()["added"] == ["n"]
    found = root.post("/v1/search", query=QUESTION, k=50, collection="new").json()["data"]
    assert {one["document_id"] for one in found} == {"n"}
    listed = root.send("GET", "/v1/documents?collection=new").json()["data"]
    assert [(one["collection"], one["id"]) for one in listed] == [("new", "n")]
    assert "new" in kb.collections()


SCOPED = (
    ("reader", "POST", "/v1/documents", 403),
    ("reader", "DELETE", "/v1/documents?id=*", 403),
    ("reader", "POST", "/v1/vector_stores", 403),
    ("reader", "GET", "/v1/documents", 200),
    ("reader", "GET", "/metrics", 403),
    ("writer", "GET", "/v1/documents", 403),
    ("writer", "POST", "/v1/search", 403),
    ("writer", "DELETE", "/v1/documents?id=*", 200),
    ("nobody", "GET", "/v1/documents", 200),
    ("root", "GET", "/metrics", 200),
    ("late", "GET", "/v1/models", 401),
)


def test_scopes_and_expiry_are_kept(served):
    for id, method, path, status in SCOPED:
        answer = caller(served, id).send(method, path, {"query": "x"} if path == "/v1/search" else None)
        assert answer.status_code == status, (id, method, path, answer.text)
        if status == 403:
            assert (answer.json()["error"]["code"], answer.json()["error"]["type"]) == (
                "not_allowed",
                "invalid_request_error",
            )
    assert caller(served, "nobody").send("GET", "/v1/documents").json()["total"] == 0
    assert "may change no documents" in caller(served, "reader").mcp("add", documents=[{"id": "x", "text": "y"}])


def test_figures_tell_a_key_of_what_it_sees(served):
    root, alice = (caller(served, id).send("GET", "/v1/store").json() for id in ("root", "alice"))
    assert (root["documents"], alice["documents"]) == (7, 2)
    assert (alice["bytes_by_tier"], alice["hits_by_tier"], alice["misses"]) == ({}, {}, 0)


def test_a_deleted_collection_answers_404_and_running_answers_end(served, kb):
    alice = caller(served, "root")
    answers = kb.collection("a").stream(QUESTION, 1, sampling=rc.Sampling(max_tokens=30))
    next(answers)
    kb.delete_collection("a")
    assert isinstance(list(answers)[-1], rc.Done)
    assert alice.chat(collection="a").status_code == 404
    assert caller(served, "reader").post("/v1/search", query="zebra").json()["data"] == []


# The file


def test_a_key_file_is_read_again_when_it_changes(served, file, caplog):
    def status(id):
        return caller(served, id).send("GET", "/v1/models").status_code

    assert status("alice") == 200
    write_key_file(file, [one for one in KEYS if one.id != "alice"])
    assert (status("alice"), status("bob")) == (401, 200)
    with caplog.at_level(logging.ERROR):
        file.write_text("[keys.alice\nnonsense")
        assert [status("bob") for _ in range(3)] == [200] * 3
        assert [one.message for one in caplog.records if "stay as they were" in one.message][1:] == []
        file.unlink()
        assert status("bob") == 200
    write_key_file(file, [])
    assert status("bob") == 401  # the last key was revoked


BAD = {
    "empty": ("", "no table"),
    "no keys": ("[keys]\n", "no key in it"),
    "nonsense": ("\x00\x01", "cannot be read"),
    "not a table": ("keys = 1\n", "no table"),
    "other tables": ("[keys]\n[key.alice]\n", "no table"),
    "a key without scopes": (f'[keys.a]\ndigest = "{"0" * 64}"\nreads = ["a"]\n', "needs scopes"),
    "an unknown scope": (f'[keys.a]\ndigest = "{"0" * 64}"\nscopes = ["all"]\n', "needs scopes"),
    "no digest": ('[keys.a]\nscopes = ["ask"]\n', "no digest"),
    "a secret for a digest": ('[keys.a]\ndigest = "rk-secret"\nscopes = ["ask"]\n', "no digest"),
    "an unknown field": (f'[keys.a]\ndigest = "{"0" * 64}"\nscope = ["ask"]\n', "no such field: scope"),
    "a key that is no table": ('[keys]\na = "x"\n', r"is no table \[keys\.a\]"),
    "a name that is none": (f'[keys.a]\ndigest = "{"0" * 64}"\nreads = ["../a"]\nscopes = ["ask"]\n', "cannot name"),
    "an unknown limit": (f'[keys.a]\ndigest = "{"0" * 64}"\nlimits.speed = 3\nscopes = ["ask"]\n', "limit: 'speed'"),
    "a limit that is none": (f'[keys.a]\ndigest = "{"0" * 64}"\nlimits.tokens = inf\nscopes = ["ask"]\n', "is inf"),
    "an expiry that is none": (f'[keys.a]\ndigest = "{"0" * 64}"\nexpires = 3\nscopes = ["ask"]\n', "is a date"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_key_file_that_cannot_be_used_is_refused(tmp_path, name):
    path, (text, told) = tmp_path / "keys.toml", BAD[name]
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=told) as refused:
        KeyFile(path)
    assert "rk-secret" not in str(refused.value)


def test_a_key_file_that_others_read_is_refused(file):
    assert read_key_file(file) == sorted(KEYS, key=lambda one: one.id)
    assert os.stat(file).st_mode & 0o777 == 0o600
    assert not [secret for secret in SECRETS.values() if secret in file.read_text()]
    file.chmod(0o604)
    with pytest.raises(ConfigError, match=r"chmod o-rwx"):
        KeyFile(file)


def test_a_cut_key_file_opens_nothing_more(file):
    """However short it is cut: it is refused, or has keys that the whole file has."""
    whole, refused = file.read_bytes(), 0
    for length in range(0, len(whole), 7):
        file.write_bytes(whole[:length])
        try:
            assert {one.id for one in KeyFile(file).current()} <= {one.id for one in KEYS}
            assert all(one in KEYS for one in KeyFile(file).current())
        except ConfigError:
            refused += 1
    assert refused > len(whole) // 14
