"""/v1/files, /v1/vector_stores and the tool file_search, by the official client."""

import shutil

import pytest
from openai import APIStatusError, BadRequestError, NotFoundError
from openai_clients import TEXT, attach, client_of
from serving import serving, wait_for

import ragcache as rc
from ragcache.server.settings import ServerSettings
from ragcache_demo.bag_of_words import BagOfWords

HAT = ("hat.md", TEXT)
COAT = ("coat.txt", b"Klara wears a blue coat in Kelbrook.")
QUESTION = "Who wears a coat in Kelbrook?"


@pytest.fixture
def library(client):
    """A vector store with two files: their ids."""
    store = client.vector_stores.create(name="clothes")
    for file, year in ((HAT, 2020), (COAT, 2024)):
        sent = client.files.create(file=file, purpose="assistants")
        attributes = {"year": year, "source": "wardrobe"}
        attach(client, store.id, sent.id, attributes=attributes)
    return store.id


def files_of(page) -> list[str]:
    return [one.filename for one in page.data]


def test_a_file_is_kept_as_it_was_sent(client):
    content = b"line\n" * 500_000  # more than one piece
    sent = client.files.create(file=("long name.txt", content), purpose="user_data")
    other = client.files.create(file=HAT, purpose="assistants")
    assert (sent.bytes, sent.filename, sent.purpose, sent.status) == (
        2_500_000,
        "long name.txt",
        "user_data",
        "processed",
    )
    assert client.files.retrieve(sent.id) == sent
    assert client.files.content(sent.id).content == content
    assert [one.id for one in client.files.list()] == [other.id, sent.id]
    assert [one.id for one in client.files.list(order="asc", limit=1)] == [sent.id, other.id]  # page by page
    assert [one.id for one in client.files.list(purpose="user_data")] == [sent.id]
    assert client.files.delete(sent.id).deleted
    with pytest.raises(NotFoundError, match="there is no file"):
        client.files.content(sent.id)


def test_a_file_may_be_as_large_as_an_upload(serve):
    with client_of(serve(max_body_bytes=2048, max_upload_bytes=8192)) as client:
        assert client.files.create(file=("a.txt", b"x" * 4096), purpose="assistants").bytes == 4096
        with pytest.raises(APIStatusError, match="larger than 8192 bytes") as refused:
            client.files.create(file=("a.txt", b"x" * 9000), purpose="assistants")
        assert refused.value.status_code == 413


def test_a_vector_store_is_searched_and_nothing_else(client, library):
    store = client.vector_stores.retrieve(library)
    assert (store.name, store.status) == ("clothes", "completed")
    assert (store.file_counts.completed, store.file_counts.total) == (2, 2)
    assert store.usage_bytes == len(HAT[1]) + len(COAT[1])
    found = client.vector_stores.search(library, query=QUESTION)
    assert files_of(found) == ["coat.txt", "hat.md"]  # none of the other documents about Kelbrook
    best = found.data[0]
    assert best.attributes == {"year": 2024, "source": "wardrobe"}
    assert best.content[0].text.strip().encode() == COAT[1]
    others = client.vector_stores.search(library, query="The rowing club of Kelbrook", max_num_results=2)
    assert len(others.data) == 2  # what is nearer stands elsewhere
    both = client.vector_stores.search(library, query=["Who wears a hat?", QUESTION])
    assert sorted(files_of(both)) == ["coat.txt", "hat.md"]  # each once
    assert files_of(client.vector_stores.search(library, query=QUESTION, max_num_results=1)) == ["coat.txt"]


def compared(type, value, key="year"):
    return {"type": type, "key": key, "value": value}


FILTERS = [
    (compared("eq", 2020), {"hat.md"}),
    (compared("ne", 2020), {"coat.txt"}),
    (compared("gt", 2020), {"coat.txt"}),
    (compared("gte", 2020), {"hat.md", "coat.txt"}),
    (compared("lt", 2020.5), {"hat.md"}),
    (compared("lte", 2019), set()),
    (compared("in", [2020, 1999]), {"hat.md"}),
    (compared("nin", [2020, 1999]), {"coat.txt"}),
    (compared("eq", "2020"), set()),
    (compared("eq", "wardrobe", "source"), {"hat.md", "coat.txt"}),
    (compared("eq", "hat.md", "source"), set()),  # an attribute of this name is no document's source
    (compared("eq", 1, "$gt"), set()),
    ({"type": "and", "filters": [compared("gt", 2000), compared("lt", 2022)]}, {"hat.md"}),
    (
        {"type": "or", "filters": [compared("eq", 2024), {"type": "and", "filters": [compared("eq", 2020)]}]},
        {"hat.md", "coat.txt"},
    ),
]


def test_the_filter_grammar(client, library):
    for filters, right in FILTERS:
        found = files_of(client.vector_stores.search(library, query=QUESTION, filters=filters))
        assert set(found) == right, filters


def test_a_vector_store_without_files(client, library):
    store = client.vector_stores.create().id
    assert client.vector_stores.search(store, query="hat").data == []
    found = ask(client, store, include=["file_search_call.results"])
    assert (found.output[0].results, found.ragcache["sources"]) == ([], [])


def test_vector_stores_keep_the_kv_of_a_file_apart(client, library, kb):
    """Each vector store is a collection: its blocks are its own, and either goes alone."""
    blocks = kb.collection(library).store.documents
    [hat] = [chunk for chunk in blocks.chunks() if "hat" in chunk.text]
    file = next(one for one in client.files.list() if one.filename == "hat.md")
    second = client.vector_stores.create(file_ids=[file.id])
    wait_for(lambda: client.vector_stores.retrieve(second.id).status == "completed")
    [again] = kb.collection(second.id).chunks()
    assert (again.text, again.handle == hat.handle) == (hat.text, False)
    assert client.vector_stores.delete(library).deleted
    assert library not in kb.collections()
    assert hat.handle not in set(kb.store.kv.keys())
    assert files_of(client.vector_stores.search(second.id, query="hat")) == ["hat.md"]
    assert client.files.delete(file.id).deleted
    assert client.vector_stores.retrieve(second.id).file_counts.total == 0
    assert not [one.id for one in kb.documents() if one.id.startswith("vs_")]


def test_files_in_a_vector_store(client, library, kb):
    hat, coat = client.vector_stores.files.list(library, order="asc").data
    assert [one.id for one in client.vector_stores.files.list(library, limit=1)] == [coat.id, hat.id]
    assert client.vector_stores.files.list(library, filter="failed").data == []
    with pytest.raises(BadRequestError):
        client.vector_stores.files.update(hat.id, vector_store_id=library, attributes={"k" * 65: 1})
    client.vector_stores.files.update(hat.id, vector_store_id=library, attributes={"year": 1999})
    changed = client.vector_stores.files.poll(hat.id, vector_store_id=library, poll_interval_ms=20)
    assert (changed.status, changed.attributes) == ("completed", {"year": 1999})
    old = client.vector_stores.search(library, query="hat", filters=compared("lt", 2000))
    assert files_of(old) == ["hat.md"]
    [read] = client.vector_stores.files.content(hat.id, vector_store_id=library).data
    assert read.text.strip().encode() == HAT[1]
    assert client.vector_stores.files.delete(hat.id, vector_store_id=library).deleted
    assert files_of(client.vector_stores.search(library, query="hat")) == ["coat.txt"]
    assert client.files.retrieve(hat.id).filename == "hat.md"
    store = client.vector_stores.update(library, name="coats", metadata={"for": "winter"})
    assert (store.name, store.metadata, store.file_counts.total) == ("coats", {"for": "winter"}, 1)
    assert [one.id for one in client.vector_stores.list()] == [library]


def test_a_batch_and_records_of_one_file(client, kb):
    store = client.vector_stores.create()
    lines = b'{"id": "one", "text": "Anna has a red scarf."}\n{"id": "two", "text": "Berta has a brown scarf."}\n'
    ids = [client.files.create(file=one, purpose="assistants").id for one in (("scarves.jsonl", lines), HAT)]
    files = [{"file_id": ids[0], "attributes": {"kind": "scarf"}}, {"file_id": ids[1]}]
    batch = client.vector_stores.file_batches.create(store.id, files=files)
    batch = client.vector_stores.file_batches.poll(batch.id, vector_store_id=store.id, poll_interval_ms=20)
    assert (batch.status, batch.file_counts.completed) == ("completed", 2)
    listed = client.vector_stores.file_batches.list_files(batch.id, vector_store_id=store.id, order="asc")
    assert [one.id for one in listed] == ids
    scarves = client.vector_stores.search(store.id, query="scarf", filters=compared("eq", "scarf", "kind"))
    assert files_of(scarves) == ["scarves.jsonl"] * 2
    assert kb.document("one") is None  # a record's own id is no other document's


def test_what_cannot_be_read_is_said(client, served):
    store = client.vector_stores.create().id

    def sent(**given):
        return client.files.create(**{"file": HAT, "purpose": "assistants", **given})

    with pytest.raises(BadRequestError) as empty:
        sent(file=("empty.txt", b""))
    with pytest.raises(BadRequestError) as purpose:
        sent(purpose="fun")
    assert (empty.value.code, purpose.value.param) == ("empty_file", "purpose")
    blank = sent(file=("blank.txt", b"  \n "))
    assert attach(client, store, blank.id).status == "failed"
    assert client.vector_stores.retrieve(store).file_counts.failed == 1
    assert served.http.post("/v1/files", json={}).status_code == 415


def test_chunks_are_cut_as_the_store_cuts(client):
    file = client.files.create(file=HAT, purpose="assistants")
    store = client.vector_stores.create().id
    attach(client, store, file.id, chunking_strategy={"type": "auto"})
    sizes = {"max_chunk_size_tokens": 256, "chunk_overlap_tokens": 0}
    with pytest.raises(BadRequestError) as refused:
        client.vector_stores.files.create(store, file_id=file.id, chunking_strategy={"type": "static", "static": sizes})
    assert refused.value.param.startswith("chunking_strategy")


def ask(client, store, input=QUESTION, **more):
    tool = {"type": "file_search", "vector_store_ids": [store], "max_num_results": 1}
    return client.responses.create(
        model="tiny", input=input, max_output_tokens=4, tools=[tool | more.pop("tool", {})], **more
    )


def test_found_rows_are_named_beside_a_files_attributes(client):
    store = client.vector_stores.create(name="fees")
    sent = client.files.create(file=("fees.csv", b"boat,fee\nTeal,12\nSwan,14\n"), purpose="assistants")
    attach(client, store.id, sent.id, attributes={"row": "of berths", "year": 2024})
    [found] = client.vector_stores.search(store.id, query="What is the fee of Teal?").data
    assert found.attributes == {"row": "of berths", "year": 2024, "last_row": 3}


def test_file_search_in_a_response(client, library, kb):
    found = ask(client, library, include=["file_search_call.results"])
    call, message = found.output
    assert (call.type, call.status, call.queries) == ("file_search_call", "completed", [QUESTION])
    [result] = call.results
    coat = next(one.id for one in client.files.list() if one.filename == "coat.txt")
    assert (result.file_id, result.filename, result.attributes["year"]) == (coat, "coat.txt", 2024)
    assert [(one.type, one.file_id, one.filename) for one in message.content[0].annotations] == [
        ("file_citation", coat, "coat.txt")
    ]
    assert [one["text"] for one in found.ragcache["sources"]] == [result.text]
    where = {"document_id": f"{library}/{coat}"}
    right = kb.chat([{"role": "user", "content": QUESTION}], k=1, filter=where, sampling=rc.Sampling(4))
    assert found.output_text == right.text
    old = ask(client, library, tool={"filters": compared("eq", 2020)})
    assert "hat" in old.ragcache["sources"][0]["text"]
    assert old.output[0].results is None
    plain = ask(client, library, tool_choice="none")
    assert [item.type for item in plain.output] == ["message"]


def test_file_search_in_a_stream(client, library):
    *_, last = events = list(ask(client, library, stream=True))
    kinds = [event.type for event in events if "file_search" in event.type]
    assert kinds == [f"response.file_search_call.{kind}" for kind in ("in_progress", "searching", "completed")]
    added = [(event.output_index, event.item.type) for event in events if event.type == "response.output_item.added"]
    assert added == [(0, "file_search_call"), (1, "message")]
    assert [item.type for item in last.response.output] == ["file_search_call", "message"]
    assert client.responses.retrieve(last.response.id).output == last.response.output


def test_file_search_in_a_conversation(client, library):
    first = ask(client, library, include=["file_search_call.results"])
    assert ask(client, library, "Why?", previous_response_id=first.id).output_text


def test_what_is_another_keys_is_not_there(serve):
    served = serve(api_keys=("first", "second"))
    with client_of(served, "first") as first, client_of(served, "second") as second:
        store = first.vector_stores.create(name="mine")
        file = first.files.create(file=HAT, purpose="assistants")
        attach(first, store.id, file.id)
        assert second.vector_stores.list().data == second.files.list().data == []
        for call in (
            lambda: second.vector_stores.retrieve(store.id),
            lambda: second.vector_stores.delete(store.id),
            lambda: second.vector_stores.search(store.id, query="hat"),
            lambda: second.vector_stores.files.list(store.id),
            lambda: second.vector_stores.create(file_ids=[file.id]),
            lambda: second.files.content(file.id),
            lambda: ask(second, store.id),
        ):
            with pytest.raises(NotFoundError):
                call()
        assert files_of(first.vector_stores.search(store.id, query="hat")) == ["hat.md"]


def test_all_of_it_outlives_the_server(lm, made, tmp_path):
    """Also answers; what waited to be indexed when the server ended is indexed by the next one."""
    path = shutil.copytree(made, tmp_path / "kb")

    def opened(**more):
        store = rc.StoreConfig(**more)
        return rc.RagCache.open(path, model=lm, method="reposition", embedder=BagOfWords(), store=store)

    def answer(client, **more):
        return client.responses.create(model="tiny", input=QUESTION, max_output_tokens=6, **more)

    with opened() as kb, serving(kb) as served, client_of(served) as client:
        kept = answer(client)
    with (
        opened() as kb,
        kb.store.layout.writer(),  # so that the indexing cannot begin
        serving(kb, ServerSettings(drain_s=0)) as served,
        client_of(served) as client,
    ):
        file = client.files.create(file=HAT, purpose="assistants")
        store = client.vector_stores.create(file_ids=[file.id])
        assert store.status == "in_progress"
    with opened() as kb, serving(kb) as served, client_of(served) as client:
        wait_for(lambda: client.vector_stores.retrieve(store.id).status == "completed")
        assert files_of(client.vector_stores.search(store.id, query="hat")) == ["hat.md"]
        assert client.files.content(file.id).content == HAT[1]
        assert client.responses.retrieve(kept.id).output_text == kept.output_text
        assert answer(client, previous_response_id=kept.id).store
    with opened(read_only=True) as kb, serving(kb) as served, client_of(served) as client:
        assert answer(client, previous_response_id=kept.id).store is False  # answered all the same
