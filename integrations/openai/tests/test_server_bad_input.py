"""What goes wrong with files, vector stores, answers and lists of them, by the official client."""

import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from kit.makers import same_as
from openai import APIStatusError, BadRequestError, NotFoundError
from openai_clients import TEXT, attach, send
from serving import wait_for

running = same_as("shared")


client = same_as("shared_client")


@pytest.fixture
def store(client) -> str:
    return client.vector_stores.create().id


def sent(client, store, name="hat.md", content=TEXT, **more):
    return attach(client, store, send(client, name, content), **more)


def answer(client, **more):
    return client.responses.create(**{"model": "tiny", "input": "Who?", "max_output_tokens": 1, **more})


def searching(store, **more):
    return {"tools": [{"type": "file_search", "vector_store_ids": [store], **more}]}


def refused(call) -> APIStatusError:
    """An error in OpenAI's form that names what is wrong."""
    with pytest.raises(APIStatusError) as found:
        call()
    assert set(found.value.body) == {"message", "type", "param", "code"}
    assert found.value.body["type"] == "invalid_request_error"
    return found.value


def nested(depth: int) -> dict:
    return {"type": "and", "filters": [nested(depth - 1)]} if depth else EQUAL


EQUAL = {"type": "eq", "key": "year", "value": 1}
MANY = {"type": "or", "filters": [{"type": "or", "filters": [EQUAL] * 100}] * 11}
FILTERS = [
    ({}, "filters.type", "is missing"),
    ({**EQUAL, "type": "near"}, "filters.type", "'eq', 'ne'"),
    ({"type": "eq", "key": "year"}, "filters.value", "is missing"),
    ({**EQUAL, "key": 1}, "filters.key", "valid string"),
    ({**EQUAL, "key": ""}, "filters.key", "at least 1"),
    ({**EQUAL, "value": None}, "filters.value", "valid"),
    ({**EQUAL, "value": 2**70}, "filters.value", "64 bits"),
    ({**EQUAL, "type": "in", "value": [True]}, "filters.value[0]", "valid"),
    ({"type": "and", "filters": []}, "filters.filters", "at least 1"),
    ({"type": "or"}, "filters.filters", "is missing"),
    ({"type": "or", "filters": [{**EQUAL, "type": "is"}]}, "filters.filters[0].type", "'eq', 'ne'"),
    (nested(9), "filters", "deeper than 8"),
    (MANY, "filters", "1100 comparisons"),
    ({**EQUAL, "type": "in", "value": 3}, "filters", "takes a list"),
    ({**EQUAL, "type": "gt", "value": True}, "filters", "compares numbers"),
    ({**EQUAL, "value": [1]}, "filters", "takes one value"),
    ([], "filters", "an object"),
    ("year", "filters", "an object"),
]


@pytest.mark.parametrize(("filters", "param", "said"), FILTERS, ids=[str(one[0])[:40] for one in FILTERS])
def test_filters_that_are_none(client, store, filters, param, said):
    searched = refused(lambda: client.vector_stores.search(store, query="hat", filters=filters))
    asked = refused(lambda: answer(client, **searching(store, filters=filters)))
    assert (searched.status_code, searched.param, asked.param) == (400, param, f"tools[0].{param}")
    for error in (searched, asked):
        assert said in error.message
        assert "parts of type 'text'" not in error.message


QUERIES = ["", " ", [], [""], ["a", ""], ["a"] * 33, 3, None]


@pytest.mark.parametrize("query", QUERIES)
def test_queries_that_are_none(client, store, query):
    assert refused(lambda: client.vector_stores.search(store, query=query)).param == "query"


METADATA = [
    {str(rank): "1" for rank in range(17)},
    {"k" * 65: "1"},
    {"": "1"},
    {"k": "v" * 513},
    {"k": 1},
    {"k": None},
    [],
]


@pytest.mark.parametrize("metadata", METADATA)
def test_metadata_has_openais_limits(client, store, metadata):
    for call in (
        lambda: client.vector_stores.create(metadata=metadata),
        lambda: client.vector_stores.update(store, metadata=metadata),
        lambda: answer(client, metadata=metadata),
    ):
        assert refused(call).param.startswith("metadata")
    largest = {f"{rank:064}": "v" * 512 for rank in range(16)}
    assert client.vector_stores.create(metadata=largest).metadata == largest
    assert answer(client, metadata=largest).metadata == largest


def test_attributes_that_are_none(client, store):
    file = send(client)
    for attributes in ({str(rank): 1 for rank in range(17)}, {"k" * 65: 1}, {"k": "v" * 513}, {"k": 2**70}, {"k": [1]}):
        call = lambda given=attributes: client.vector_stores.files.create(store, file_id=file, attributes=given)  # noqa: E731
        assert refused(call).param.startswith("attributes")


def test_attributes_are_not_what_a_file_says_of_itself(client, store):
    own = b"---\n_attributes.year: 1\n_file_id: file-other\n_vector_store_id: vs_other\n---\nThe hat is green."
    sent(client, store, content=own, attributes={"kind": "hat"})
    assert client.vector_stores.search(store, query="hat", filters=EQUAL).data == []
    assert len(client.vector_stores.search(store, query="hat").data) == 1


# Lists


def test_cursors_that_never_were_are_refused(client, store):
    for call in (
        lambda **at: client.files.list(**at),
        lambda **at: client.vector_stores.list(**at),
        lambda **at: client.vector_stores.files.list(store, **at),
    ):
        for id in ("nothing", "\0", "file-\U0001f600"):
            error = refused(lambda call=call, id=id: call(after=id))
            assert (error.status_code, error.param) == (400, "after")
        call(after="")  # as if it were left out
    assert refused(lambda: client.vector_stores.list(before=store)).param == "before"
    assert refused(lambda: client.files.list(limit=10_001)).param == "limit"
    assert client.files.list(limit=10_000).data is not None


# Files


def test_names_of_files(client, store):
    for name in (
        "\u202ecod.md",
        "e\u0301.md",
        "\U0001f600.md",
        "n" * 300 + ".md",
        " .md",
        "a;b.md",
        "日本語.txt",
        "A.MD",
    ):
        attached = sent(client, store, name)
        assert (attached.status, client.files.retrieve(attached.id).filename) == ("completed", name)
    assert client.files.retrieve(send(client, "../../x.md")).filename == "x.md"
    for name in (".md", "README", "song.mp3"):
        error = refused(lambda name=name: sent(client, store, name))
        assert (error.code, error.param) == ("unsupported_file", "file_id")
        assert re.search(r"known are .*\.docx .*\.txt", error.message)


UNREAD = {
    "latin.txt": (b"caf\xe9 in the town", "latin.txt: the file is not UTF-8"),
    "binary.txt": (b"\0\1\2" * 50, "binary.txt: the file is binary"),
    "broken.json": (b"{nope", "broken.json: the file is not JSON"),
    "broken.pdf": (b"%PDF-nope", "broken.pdf: the PDF is damaged"),
    "broken.docx": (b"PK nope", "broken.docx: the file is damaged"),
    "blank.txt": (b"  \n ", "blank.txt: the file is empty"),
    "markup.html": (b"<html><script>x</script></html>", "markup.html: there is no text in it"),
}


@pytest.mark.parametrize("name", UNREAD)
def test_files_that_cannot_be_read(client, store, name):
    content, said = UNREAD[name]
    failed = sent(client, store, name, content)
    assert (failed.status, failed.last_error.code) == ("failed", "invalid_file")
    assert failed.last_error.message.startswith(said)


def test_a_part_that_cannot_be_read_is_said(client, store):
    lines = b'{"text": "A green hat."}\n{"no": 1}\nnonsense\n{"text": "A blue coat."}\n'
    read = sent(client, store, "mixed.jsonl", lines)
    assert (read.status, read.last_error.code) == ("completed", "invalid_file")
    assert read.last_error.message.startswith("2 parts of the file could not be read; the first: mixed.jsonl:2")
    assert len(client.vector_stores.search(store, query="hat coat").data) == 2
    assert sent(client, store, "whole.jsonl", lines[:24]).last_error is None


def test_nothing_expires(client):
    seconds, days = {"anchor": "created_at", "seconds": 3600}, {"anchor": "last_active_at", "days": 1}
    file = refused(lambda: client.files.create(file=("hat.md", TEXT), purpose="assistants", expires_after=seconds))
    store = refused(lambda: client.vector_stores.create(expires_after=days))
    assert (file.param, file.code, store.param) == ("expires_after", "unsupported_parameter", "expires_after")
    assert "do not expire here" in store.message


def test_unknown_fields_of_a_form_are_named_or_refused(running, monkeypatch):
    form = {"purpose": (None, "assistants"), "colour": (None, "red"), "file": ("hat.md", TEXT)}
    sent = running.http.post("/v1/files", files=form)
    assert (sent.status_code, sent.headers["x-ragcache-warning"]) == (200, "unknown fields ignored: colour")
    monkeypatch.setattr(running.service, "settings", replace(running.service.settings, strict=True))
    answered = running.http.post("/v1/files", files=form)
    assert (answered.status_code, answered.json()["error"]["param"]) == (400, "colour")


# What is gone, or two things at once


def test_documents_and_a_file_search_exclude_each_other(client, store):
    told = {"ragcache": {"documents": [{"text": "A hat."}]}}
    assert refused(lambda: answer(client, **searching(store), extra_body=told)).param == "ragcache.documents"


def test_what_is_gone(client, store):
    first = answer(client, **searching(store))
    client.vector_stores.delete(store)
    for call, param in (
        (lambda: answer(client, **searching(store)), "tools[0].vector_store_ids"),
        (lambda: answer(client, **searching(store), previous_response_id=first.id), "tools[0].vector_store_ids"),
        (lambda: answer(client, **searching(store), stream=True), "tools[0].vector_store_ids"),
        (lambda: client.vector_stores.search(store, query="hat"), "vector_store_id"),
        (lambda: client.vector_stores.files.list(store), "vector_store_id"),
        (lambda: client.vector_stores.files.create(store, file_id=send(client)), "vector_store_id"),
    ):
        error = refused(call)
        assert (type(error), error.param, error.code) == (NotFoundError, param, "vector_store_not_found")
        assert "there is no vector store" in error.message
    assert answer(client, previous_response_id=first.id).output_text is not None  # without the search it goes on
    client.responses.delete(first.id)
    gone = refused(lambda: answer(client, previous_response_id=first.id, stream=True))
    assert (type(gone), gone.param) == (BadRequestError, "previous_response_id")


def test_two_at_once(client, store):
    """The same file and others, sent and attached side by side."""
    with ThreadPoolExecutor(8) as pool:
        ids = list(pool.map(lambda rank: send(client, f"{rank}.md", TEXT + b" %d" % rank), range(8)))
        assert len(set(ids)) == 8
        list(pool.map(lambda id: client.vector_stores.files.create(store, file_id=id), [*ids, *ids]))
    wait_for(lambda: client.vector_stores.retrieve(store).status == "completed")
    assert client.vector_stores.retrieve(store).file_counts.completed == 8
    found = client.vector_stores.search(store, query="hat", max_num_results=50).data
    assert sorted(one.file_id for one in found) == sorted(ids)


def test_a_client_that_hangs_up_frees_its_slot(client, running, store):
    asked = {"input": "Who wears a hat?", "max_output_tokens": 2000, "stream": True, **searching(store)}
    with answer(client, **asked) as events:
        next(iter(events))
    wait_for(lambda: running.service.slots.in_use == 0)
