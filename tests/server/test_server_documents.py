"""Documents in, listed, and out again; uploads with progress; embeddings."""

import base64
import json
import time
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import quote

import numpy as np
from engine_texts import TEXTS
from openai import OpenAI
from serving import Served, events, wait_for

import ragcache as rc
from ragcache_demo.bag_of_words import BagOfWords

PATH = "/v1/documents"
NEW = {"id": "notes/new one.md", "text": "Tall trees grow slowly.", "metadata": {"year": 2024}, "title": "Trees"}
FILES = {
    "a.md": b"# Owls\n\nOwls hunt at night.\n",
    "b.txt": b"Bees dance.\n",
    "c.html": b"<html><title>Ants</title><body><p>Ants march.</p></body></html>",
    "d.jsonl": b'{"id": "moles", "text": "Moles dig."}\nthis is no JSON\n',
    "e.exe": b"\0\1\2",
    "f.txt": b"\xff\xfe",
}


def form(files: dict[str, bytes]) -> list:
    return [("files", (name, data)) for name, data in files.items()]


def test_json_documents(served: Served, kb):
    report = served.http.post(PATH, json={"documents": [NEW]}).json()
    assert report == {"added": [NEW["id"]], "updated": [], "unchanged": [], "failed": [], "chunks": 1, "tokens": 24}
    assert served.http.post(PATH, json={"documents": [NEW]}).json()["unchanged"] == [NEW["id"]]
    changed = {**NEW, "text": "Tall trees fall."}
    assert served.http.post(PATH, json={"documents": [changed]}).json()["updated"] == [NEW["id"]]
    stored = kb.document(NEW["id"])
    assert (stored.title, stored.metadata) == ("Trees", {"year": 2024})
    assert [chunk.text for chunk in kb.chunks_of(NEW["id"])] == ["Tall trees fall.\n"]


def test_a_handle_in_metadata_is_not_stored(served: Served, kb):
    """A search put it there: `attach` names each passage's KV so."""
    metadata = {**NEW["metadata"], "ragcache_handle": "0" * 64}
    added = [{**NEW, "metadata": metadata}, {**NEW, "id": "other", "metadata": {"ragcache_handle": 1}}]
    assert len(served.http.post(PATH, json={"documents": added}).json()["added"]) == 2
    assert [kb.document(one["id"]).metadata for one in added] == [{"year": 2024}, {}]
    assert served.http.post(PATH, json={"documents": [NEW]}).json()["unchanged"] == [NEW["id"]]


def test_documents_that_are_not_to_be_split(served: Served, kb):
    text = "# One\n\nFirst.\n\n# Two\n\nSecond.\n" * 20
    whole = {"documents": [{"id": "whole", "text": text}], "split": False}
    assert served.http.post(PATH, json=whole).json()["chunks"] == 1
    assert [(chunk.id, chunk.text) for chunk in kb.chunks_of("whole")] == [("whole", text)]
    split = {"documents": [{"id": "split", "text": text}]}
    assert served.http.post(PATH, json=split).json()["chunks"] > 1


def test_a_document_that_cannot_be_stored_is_named_and_the_others_are(served: Served):
    documents = [{"id": "empty", "text": "  "}, {"id": "full", "text": "words"}, {"id": "full", "text": "others"}]
    report = served.http.post(PATH, json={"documents": documents}).json()
    assert report["added"] == ["full"]
    assert [(failure["source"], failure["type"]) for failure in report["failed"]] == [
        ("empty", "ReaderError"),
        ("full", "DuplicateDocumentError"),
    ]


def test_files(served: Served, kb):
    report = served.http.post(PATH, files=form(FILES)).json()
    assert sorted(report["added"]) == ["a.md", "b.txt", "c.html", "moles"]
    assert {failure["source"] for failure in report["failed"]} == {"d.jsonl:2", "e.exe", "f.txt"}
    assert {kb.document(id).source for id in report["added"]} == {"a.md", "b.txt", "c.html", "d.jsonl:1"}
    assert "/tmp" not in json.dumps(report)
    again = served.http.post(PATH, files=form(FILES)).json()
    assert sorted(again["unchanged"]) == sorted(report["added"])


def test_a_file_replaces_another_of_its_name_only_where_that_is_asked_for(served: Served, kb):
    """Browsers send the last part of a path alone: the files of two folders have one name."""
    served.http.post(PATH, files=form({"readme.md": b"Boats are locked at dusk.\n"}))
    other = form({"readme.md": b"Roses are cut in spring.\n", "more.md": b"Tulips too.\n"})
    report = served.http.post(PATH, files=other).json()
    assert (report["added"], report["updated"]) == (["more.md"], [])
    [failure] = report["failed"]
    assert (failure["source"], failure["type"]) == ("readme.md", "DocumentExistsError")
    assert "replace=true" in failure["error"]
    assert [chunk.text for chunk in kb.chunks_of("readme.md")] == ["Boats are locked at dusk.\n"]
    report = served.http.post(PATH, params={"replace": True}, files=other).json()
    assert (report["updated"], report["unchanged"], report["failed"]) == (["readme.md"], ["more.md"], [])
    assert [chunk.text for chunk in kb.chunks_of("readme.md")] == ["Roses are cut in spring.\n"]


def test_files_are_what_the_command_line_makes_of_them(served: Served, kb, lm, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    for name, data in FILES.items():
        (folder / name).write_bytes(data)
    served.http.post(PATH, files=form(FILES))
    with rc.RagCache.open(tmp_path / "other", model=lm, method="reposition", embedder=kb.embedder) as other:
        for id in other.ingest(folder).added:
            uploaded = id.removeprefix(f"{folder}/")
            assert [chunk.text for chunk in kb.chunks_of(uploaded)] == [chunk.text for chunk in other.chunks_of(id)]
            assert kb.document(uploaded).title == other.document(id).title


def test_names_of_files_stay_names(served: Served, kb, tmp_path):
    names = ["../../up.txt", "/etc/abs.txt", "deep/er.txt", "win\\dows.txt", "x.."]
    report = served.http.post(PATH, files=[("files", (name, b"x y")) for name in names]).json()
    assert report["added"] == ["up.txt", "etc/abs.txt", "deep/er.txt", "win/dows.txt"]
    assert [failure["source"] for failure in report["failed"]] == ["x.."]
    assert served.http.get(f"{PATH}/deep/er.txt").json()["id"] == "deep/er.txt"


def test_an_upload_tells_its_progress(served: Served):
    headers = {"Accept": "text/event-stream"}
    with served.http.stream("POST", PATH, files=form(FILES), headers=headers) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        found = [(name, json.loads(data)) for name, data in events(response.iter_lines())]
    *progress, (name, report) = found
    assert name == "done"
    assert sorted(report["added"]) == ["a.md", "b.txt", "c.html", "moles"]
    assert {kind for kind, _ in progress} == {"progress"}
    assert {said["stage"] for _, said in progress} == {"read", "embed", "encode", "commit"}
    commits = [said for _, said in progress if said["stage"] == "commit"]
    assert [said["done"] for said in commits] == [1, 2, 3, 4]
    assert sorted(said["item"] for said in commits) == sorted(report["added"])


def test_a_list_in_pages(served: Served):
    whole = served.http.get(PATH).json()
    assert [one["id"] for one in whole["data"]] == sorted(TEXTS)
    page = served.http.get(PATH, params={"limit": 2, "offset": 1}).json()
    assert (page["object"], page["total"]) == ("list", 4)
    assert page["data"] == whole["data"][1:3]
    assert page["data"][0]["metadata"] == {"letters": 5}
    assert page["data"][0]["state"] == "ready"


def test_one_document(served: Served, kb):
    found = served.http.get(f"{PATH}/cats").json()
    chunk = kb.chunks_of("cats")[0]
    assert found["chunks_data"] == [
        {"id": chunk.id, "text": chunk.text, "tokens": chunk.num_tokens, "handle": chunk.handle}
    ]
    assert abs(found["created_at"] - time.time()) < 3600


def test_ids_of_all_kinds(served: Served):
    for id in ("with space", "/a/b c.md", "q?x=1&y#z", "percent%2Fsign", "ümlaut 好 🙂", "+", "a//b"):
        assert served.http.post(PATH, json={"documents": [{"id": id, "text": "words"}]}).json()["added"] == [id]
        url = f"{PATH}/{quote(id, safe='')}"
        for place in (url, f"{PATH}/{quote(id)}"):
            assert served.http.get(place).json()["id"] == id
        assert served.http.delete(url).json() == {"id": id, "object": "document", "deleted": True}
        assert served.http.get(url).status_code == 404, id


def test_a_deleted_document_is_in_no_answer(served: Served, kb):
    assert (
        served.chat("Where does the cat sit?", max_tokens=1).json()["ragcache"]["sources"][0]["document_id"] == "cats"
    )
    handle = kb.chunks_of("cats")[0].handle
    assert served.http.delete(f"{PATH}/cats").status_code == 200
    sources = served.chat("Where does the cat sit?", max_tokens=1).json()["ragcache"]["sources"]
    assert "cats" not in {source["document_id"] for source in sources}
    assert handle not in kb.store.kv
    assert served.http.delete(f"{PATH}/cats").status_code == 404


def test_two_writers(serve, kb):
    served = serve(write_wait_s=0.2)
    with kb.store.layout.writer():
        for refused in (
            served.http.post(PATH, json={"documents": [NEW]}),
            served.http.post(PATH, files=form(FILES), headers={"Accept": "text/event-stream"}),
            served.http.delete(f"{PATH}/cats"),
        ):
            assert (refused.status_code, refused.json()["error"]["code"]) == (409, "store_busy")
            assert int(refused.headers["retry-after"]) >= 1
            assert str(kb.store.layout.root) not in refused.text
    assert served.http.post(PATH, json={"documents": [NEW]}).json()["added"] == [NEW["id"]]


def test_writers_take_turns(served: Served, kb):
    def add(rank: int):
        return served.http.post(PATH, json={"documents": [{"id": f"n{rank}", "text": f"Note {rank}."}]}).json()

    with ThreadPoolExecutor(8) as pool:
        reports = list(pool.map(add, range(8)))
    assert sorted(id for report in reports for id in report["added"]) == [f"n{rank}" for rank in range(8)]


def test_an_uploader_that_hangs_up_lets_the_next_one_in(served: Served, kb):
    many = [{"id": f"d{rank}", "text": f"Document {rank} is about {rank}. " * 40} for rank in range(300)]
    headers = {"Accept": "text/event-stream"}
    with served.http.stream("POST", PATH, json={"documents": many}, headers=headers) as response:
        next(events(response.iter_lines()))
    wait_for(lambda: not served.service.writers._lock.locked())
    assert len(kb.documents()) < 300
    assert served.http.post(PATH, json={"documents": [NEW]}).json()["added"] == [NEW["id"]]


def test_figures_follow_changes(served: Served, kb):
    before = served.http.get("/v1/store").json()
    assert (before["documents"], before["model"], before["method"]) == (4, "tiny", "reposition")
    assert before["embedder"] == "bag-of-words"
    assert before["max_positions"] == 4096
    assert (before["max_upload_bytes"], before["max_upload_files"]) == (64 << 20, 100)
    assert {".md", ".pdf"} < set(before["file_kinds"])
    served.http.post(PATH, json={"documents": [NEW]})
    after = served.http.get("/v1/store").json()
    assert after["documents"] == 5
    assert after["bytes_by_tier"]["disk"] > before["bytes_by_tier"]["disk"]


def test_methods_say_what_can_run(served: Served):
    found = {one["name"]: one["usable"] for one in served.http.get("/v1/methods").json()["data"]}
    assert list(found) == list(rc.METHODS)
    for name, usable in found.items():
        status = served.chat("Cats?", max_tokens=1, ragcache={"method": name}).status_code
        assert (status == 200) == usable, name


def test_embeddings_are_the_stores_own(served: Served, kb):
    texts = ["Cats sit.", "Dogs bark at night."] * 40
    right = kb.embedder.embed(texts)
    with OpenAI(base_url=served.base_url, api_key="none", max_retries=0) as client:
        packed = client.embeddings.create(model="bag-of-words", input=texts)  # base64 on the wire, unpacked here
        plain = client.embeddings.create(model="bag-of-words", input=texts, encoding_format="float", dimensions=24)
        one = client.embeddings.create(model="bag-of-words", input=texts[0])
    for found in (packed, plain):
        np.testing.assert_array_equal(np.array([item.embedding for item in found.data], np.float32), right)
        assert [item.index for item in found.data] == list(range(80))
    np.testing.assert_array_equal(np.array(one.data[0].embedding, np.float32), right[0])
    assert one.usage.prompt_tokens == len(texts[0])  # this model's tokens are bytes
    raw = served.http.post(
        "/v1/embeddings", json={"model": "bag-of-words", "input": texts[0], "encoding_format": "base64"}
    ).json()
    assert np.frombuffer(base64.b64decode(raw["data"][0]["embedding"]), "<f4").tolist() == right[0].tolist()


class Nested(BagOfWords):
    """Reads token ids, which are characters, and may be cut to 8 numbers."""

    dimensions = (8, 24)

    def text_of(self, ids):
        return "".join(map(chr, ids))


def test_embeddings_of_token_ids_and_of_fewer_dimensions(served: Served, kb):
    kb.retriever.embedder = Nested()
    texts = ["Cats sit.", "Dogs bark at night."]
    ids = [[ord(letter) for letter in text] for text in texts]
    right = kb.embedder.embed(texts)
    with OpenAI(base_url=served.base_url, api_key="none", max_retries=0) as client:
        whole = client.embeddings.create(model="bag-of-words", input=ids)
        one = client.embeddings.create(model="bag-of-words", input=ids[0], dimensions=24)
        cut = client.embeddings.create(model="bag-of-words", input=texts, dimensions=8)
    np.testing.assert_array_equal(np.array([item.embedding for item in whole.data], np.float32), right)
    np.testing.assert_array_equal(np.array(one.data[0].embedding, np.float32), right[0])
    for item, vector in zip(cut.data, right, strict=True):
        np.testing.assert_allclose(item.embedding, vector[:8] / np.sqrt((vector[:8] ** 2).sum()), rtol=1e-5)
    refused = served.http.post("/v1/embeddings", json={"model": "bag-of-words", "input": "x", "dimensions": 9})
    assert refused.status_code == 400
    assert "8, 24 dimensions" in refused.json()["error"]["message"]


def test_documents_are_listed_and_deleted_by_source_and_id(served: Served, kb):
    documents = [
        {"id": name, "text": f"Words of {name}.", "source": source}
        for name, source in {"n1": "/srv/notes/a.md", "n2": "/srv/notes/b.md", "n3": "web"}.items()
    ]
    served.http.post(PATH, json={"documents": documents})

    def listed(**query: str) -> list[str]:
        answer = served.http.get(PATH, params=query).json()
        assert answer["total"] == len(answer["data"])
        return [document["id"] for document in answer["data"]]

    assert listed(source="/srv/notes/*") == ["n1", "n2"]
    assert listed(source="web") == listed(id="n3") == ["n3"]
    assert listed(source="/srv/*", id="n?", limit="5") == ["n1", "n2"]
    assert listed(source="") == []
    before = len(kb.documents())
    assert served.http.delete(PATH).status_code == 400
    assert len(kb.documents()) == before
    assert served.http.delete(PATH, params={"source": "/srv/notes/*"}).json()["deleted"] == ["n1", "n2"]
    assert served.http.delete(PATH, params={"source": "/srv/notes/*"}).json()["deleted"] == []
    assert kb.documents({"source": {"$glob": "/srv/*"}}) == []
    assert len(kb.documents()) == before - 2
