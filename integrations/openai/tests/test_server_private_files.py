"""Files in vector stores are found by file search alone: no other route finds, shows, changes or deletes them."""

import json
import shutil

import httpx
import pytest
from openai import OpenAI
from serving import READS, Caller, Served, serving, wait_for

import ragcache as rc
from ragcache.server.settings import ServerSettings
from ragcache_demo.bag_of_words import BagOfWords

TEXT = "The zebra password of Kelbrook is quagga, and the zebra sleeps in the tower of Kelbrook until the morning bell."
FILE = ("zebras.md", f"---\nherd: quagga\n---\n{TEXT}\n".encode())
QUESTION = "What is the zebra password of Kelbrook?"
SECRETS = ("zebra", "quagga", "herd", "vs_", "tower")


@pytest.fixture(scope="module", params=[(), ("first", "second")])
def world(request, lm, made, tmp_path_factory):
    """A server without keys, or with these, and a file in a vector store of the first key, which asks."""
    path = shutil.copytree(made, tmp_path_factory.mktemp("private") / "kb")
    with (
        rc.RagCache.open(path, model=lm, method="reposition", embedder=BagOfWords()) as kb,
        serving(kb, ServerSettings(drain_s=5, api_keys=request.param)) as served,
        OpenAI(base_url=served.base_url, api_key="first", max_retries=0) as owner,
    ):
        file = owner.files.create(file=FILE, purpose="assistants")
        store = owner.vector_stores.create(file_ids=[file.id])
        wait_for(lambda: owner.vector_stores.retrieve(store.id).status == "completed")
        yield World(served, owner, kb, "first", store.id, file.id)


class World(Caller):
    """document, chunk, handle: of the file, as the store has them"""

    def __init__(self, served: Served, owner: OpenAI, kb: rc.RagCache, key: str, store: str, file: str) -> None:
        super().__init__(served, key, QUESTION)
        self.owner, self.kb, self.store, self.document = owner, kb, store, f"{store}/{file}"
        [chunk] = kb.chunks_of(self.document)
        self.chunk, self.handle = chunk.id, chunk.handle

    def is_there(self) -> bool:
        """Whether the file is found by its owner, as it was."""
        found = self.owner.vector_stores.search(self.store, query=QUESTION).data
        return [TEXT in part.text for one in found for part in one.content] == [True]


def inside(world: World) -> dict[str, object]:
    return {"document_id": {"$glob": f"{world.store}/*"}}


READS = READS | {
    "search for variety": lambda w: w.post("/v1/search", query=QUESTION, k=5, mmr_lambda=0.5).text,
    "filter of the store": lambda w: w.post("/v1/search", query=QUESTION, filter=inside(w)).text,
    "filter of anything": lambda w: (
        w.post("/v1/search", query=QUESTION, filter={"$or": [{"herd": {"$exists": True}}, {"letters": 4}]}).text
    ),
    "fields that there are": lambda w: w.post("/v1/search", query="Who?", filter={"nothing": 1}).text,
    "chat by filter": lambda w: w.chat(filter=inside(w)).text,
    "chat in the store": lambda w: w.chat(collection=w.store).text.replace(w.store, ""),
    "chat over a passage by id": lambda w: w.chat("Why?", documents=[{"id": w.chunk}]).text.replace(w.chunk, ""),
    "chat over a passage by handle": lambda w: w.chat("Why?", documents=[{"handle": w.handle}]).text,
    "mcp search by filter": lambda w: w.mcp("search", query=QUESTION, filter=inside(w)),
    "documents by id": lambda w: w.send("GET", "/v1/documents?id=vs_*").text,
    "documents by source": lambda w: w.send("GET", "/v1/documents?source=zeb*").text,
    "document": lambda w: w.send("GET", f"/v1/documents/{w.document}").text.replace(w.document, ""),
}


@pytest.mark.parametrize("name", READS)
def test_no_other_route_reads_them(world, name):
    told = READS[name](world)
    assert "error" in told or "data" in told or "sources" in told or "passages" in told
    assert not [word for word in SECRETS if word in told], told
    assert world.is_there()


def test_a_passage_that_stands_in_a_prompt_tells_nothing_about_its_file(world):
    """It is read from its KV, or as text; of whose it is nothing is said."""
    for body in (world.chat(f"{TEXT}\nWhy?", retrieve=False), world.chat("Why?", documents=[{"text": TEXT}])):
        assert body.status_code == 200
        sources = body.json()["ragcache"]["sources"]
        assert not [one for one in sources if one["document_id"] or one["metadata"] or "zebras" in one["source"]]


WRITES = {
    "delete": lambda w: w.send("DELETE", f"/v1/documents/{w.document}").status_code == 404,
    "delete by id": lambda w: w.send("DELETE", "/v1/documents?id=vs_*").json()["deleted"] == [],
    "delete by source": lambda w: w.send("DELETE", "/v1/documents?source=zebras*").json()["deleted"] == [],
    "mcp delete": lambda w: w.document in json.loads(w.mcp("delete", ids=[w.document]))["unknown"],
    "another document of its id": lambda w: w.document in added(w, w.document),
    "mcp add": lambda w: w.document in w.mcp("add", documents=[{"id": w.document, "text": "Other."}]),
}


def added(world: World, id: str) -> list[str]:
    document = {"id": id, "text": "The zebra password of Kelbrook is wrong."}
    return world.post("/v1/documents", documents=[document]).json()["added"]


@pytest.mark.parametrize("name", WRITES)
def test_no_other_route_changes_them(world, name):
    assert WRITES[name](world)
    assert world.is_there()
    default = world.kb.collection("default")
    assert default.delete(world.document) == ([world.document] if "add" in name or "another" in name else [])
    assert world.is_there()


def test_file_search_sees_its_stores_alone(world):
    """Neither another vector store's passage, named by its id, nor the server's own documents."""
    other = world.owner.vector_stores.create().id
    tool = {"type": "file_search", "vector_store_ids": [other]}
    asked = {"model": "tiny", "input": QUESTION, "max_output_tokens": 1, "tools": [tool]}
    http = httpx.Client(
        base_url=world.served.url, headers={"Authorization": "Bearer first"}, trust_env=False, timeout=60
    )
    with http:
        found = http.post("/v1/responses", json=asked).json()
        assert found["ragcache"]["sources"] == []
        fields = http.post("/v1/responses", json={**asked, "ragcache": {"filter": {"nothing": 1}}})
        assert "herd" not in fields.text
        assert "letters" not in fields.text
        named = http.post("/v1/responses", json={**asked, "ragcache": {"documents": [{"id": world.chunk}]}})
        assert "quagga" not in named.text


def test_a_store_without_them_is_searched_without_a_filter(kb, serve, monkeypatch):
    served, asked = serve(), []
    find = type(kb.retriever.index).find
    monkeypatch.setattr(
        type(kb.retriever.index), "find", lambda self, documents, vector, k, where: asked.append(
            documents.shows_all(where)
        ) or find(self, documents, vector, k, where)
    )  # fmt: skip
    served.http.post("/v1/search", json={"query": QUESTION}).raise_for_status()
    kb.collection("vs_1").ingest(rc.Document("vs_1/file-1", TEXT))
    found = served.http.post("/v1/search", json={"query": QUESTION}).json()["data"]
    assert asked == [True, False]
    assert len(found) == 4  # the server's own
