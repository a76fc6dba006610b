"""POST /v1/rerank: the order and the scores are the reranker's."""

import math
import shutil

import httpx
import numpy as np
import pytest
from serving import serving

import ragcache as rc
from ragcache_demo.bag_of_words import BagOfWords

SCORES = {"none": -300.0, "some": -0.5, "more": 2.0, "most": 300.0}


class ByWord:
    """Scores a text by the word that it is."""

    name = "by-word"

    def scores(self, question, texts):
        assert question == "How much?"
        return np.array([SCORES[text] for text in texts], np.float32)


@pytest.fixture(scope="module")
def http(lm, made, tmp_path_factory):
    path = shutil.copytree(made, tmp_path_factory.mktemp("reranking") / "kb")
    with (
        rc.RagCache.open(path, model=lm, method="reposition", embedder=BagOfWords(), reranker=ByWord()) as kb,
        serving(kb) as served,
    ):
        yield served.http


def ranked(http: httpx.Client, **fields: object) -> httpx.Response:
    body = {"model": "by-word", "query": "How much?", "documents": ["some", "none", "most", "more"], **fields}
    return http.post("/v1/rerank", json=body)


def test_texts_come_back_best_first_with_their_places(http):
    found = ranked(http).json()
    assert found["model"] == "by-word"
    assert [one["index"] for one in found["results"]] == [2, 3, 0, 1]
    assert [one["document"]["text"] for one in found["results"]] == ["most", "more", "some", "none"]
    sigmoids = [1.0, *(1 / (1 + math.exp(-SCORES[word])) for word in ("more", "some")), 0.0]
    assert [one["relevance_score"] for one in found["results"]] == pytest.approx(sigmoids, abs=1e-6)


def test_the_best_alone_without_their_texts(http):
    documents = [{"text": "some", "id": 7}, {"text": "more"}]
    found = ranked(http, documents=documents, top_n=1, return_documents=False).json()
    assert [set(one) for one in found["results"]] == [{"index", "relevance_score"}]
    assert found["results"][0]["index"] == 1


def test_the_reranker_is_among_the_models(http):
    assert "by-word" in [one["id"] for one in http.get("/v1/models").json()["data"]]


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"model": "another"}, 404, "model"),
        ({"documents": []}, 400, "documents"),
        ({"documents": [{"title": "some"}]}, 400, "documents[0].text"),
        ({"query": ""}, 400, "query"),
        ({"top_n": 0}, 400, "top_n"),
    ],
)
def test_a_bad_request_is_refused_by_name(http, fields, status, param):
    response = ranked(http, **fields)
    assert (response.status_code, response.json()["error"]["param"]) == (status, param)


def test_a_server_without_a_reranker_says_how_to_get_one(served):
    response = ranked(served.http)
    assert response.status_code == 404
    assert "--reranker" in response.json()["error"]["message"]
