"""Search by words: BM25 against NumPy, an index that follows every change, both rankings fused."""

import math
import re
from itertools import product

import numpy as np
import pytest
from postgres_server import postgres_schema
from sqlalchemy import text

from ragcache.errors import ConfigError, FilterError, StoreReadOnlyError
from ragcache.retrieval.retriever import FETCH_FACTOR, Retriever
from ragcache.store.documents import DocumentStore
from ragcache.store.records import NewChunk, NewDocument, StoredVersion
from ragcache.store.text_search import WORDS
from ragcache_demo.bag_of_words import BagOfWords

OLD = {
    "sqlite": [
        "CREATE VIRTUAL TABLE ragcache_text USING fts5(text, content='ragcache_chunks', content_rowid='vector_id')",
        "CREATE TRIGGER ragcache_text_insert AFTER INSERT ON ragcache_chunks BEGIN "
        "INSERT INTO ragcache_text(rowid, text) VALUES (new.vector_id, new.text); END",
        "CREATE TRIGGER ragcache_text_delete AFTER DELETE ON ragcache_chunks BEGIN "
        "INSERT INTO ragcache_text(ragcache_text, rowid, text) VALUES ('delete', old.vector_id, old.text); END",
        "INSERT INTO ragcache_text(ragcache_text) VALUES ('rebuild')",
    ],
    "postgresql": ["CREATE INDEX ragcache_text ON ragcache_chunks USING gin (to_tsvector('english', text))"],
}

# No word of these is changed by stemming, and none is a stop word.
TEXTS = [
    "bridg mill mill river",
    "river club fox",
    "mill fox fox fox wolf wolf",
    "club",
    "wolf river river mill club fox bridg moss fern",
    "fern moss",
    "moss moss moss",
]
EMBEDDER = BagOfWords()


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request, tmp_path):
    if request.param == "sqlite":
        yield tmp_path / "store.sqlite3"
    else:
        yield from postgres_schema()


def put(store, id, texts, **metadata):
    rows = zip(texts, EMBEDDER.embed(texts), strict=True)
    chunks = [NewChunk(f"{id}#{n}", text, [1], vector, handle=f"{n:064x}") for n, (text, vector) in enumerate(rows)]
    return store.replace_document(NewDocument(id, metadata=metadata), chunks)


@pytest.fixture
def store(url):
    with DocumentStore.open(url) as opened:
        for number, text in enumerate(TEXTS):
            put(opened, f"d{number}", [text], number=number)
        yield opened


def texts_of(store, question, limit=100, where=None):
    return [chunk.text for chunk in store.chunks_by_vector_ids(store.search_text(question, limit, where))]


def bm25(question, texts):
    """Robertson's formula with k1 = 1.2, b = 0.75 and idf at least 1e-6, as FTS5 documents it; best first."""
    words = [text.split() for text in texts]
    mean = sum(map(len, words)) / len(words)
    scores = np.zeros(len(texts))
    for term in set(question.split()):
        holding = sum(term in one for one in words)
        idf = max(math.log((len(texts) - holding + 0.5) / (holding + 0.5)), 1e-6)
        for number, one in enumerate(words):
            count = one.count(term)
            scores[number] += idf * count * 2.2 / (count + 1.2 * (0.25 + 0.75 * len(one) / mean))
    return [texts[number] for number in np.argsort(-scores, kind="stable") if scores[number] > 0]


def test_sqlite_ranks_by_bm25(retriever):
    for question in ("moss", "fern wolf", "bridg fox moss", "club wolf fern moss", "moss moss river"):
        assert texts_of(retriever.documents, question) == bm25(question, TEXTS), question


def test_any_word_of_the_question_counts_in_any_form(store):
    assert set(texts_of(store, "Where is a WOLF, or a fern?")) == {TEXTS[2], TEXTS[4], TEXTS[5]}
    assert texts_of(store, "moss")[0] == TEXTS[6]
    assert set(texts_of(store, "the foxes")) == {TEXTS[1], TEXTS[2], TEXTS[4]}
    assert len(store.search_text("river mill club", 2)) == 2
    assert texts_of(store, "zebra") == []


def test_no_question_breaks_the_querys_syntax(store):
    for question in ("?!", "", '"', "fox\"' OR NEAR(wolf* AND -x ^", "a:b (c | d) & !e <-> f", "x" * 10**5):
        assert set(texts_of(store, question)) <= set(TEXTS), question


def test_a_question_is_looked_for_by_its_first_words(store):
    many = [f"word{number}" for number in range(WORDS)]
    assert texts_of(store, " ".join([*many[1:], "fern"]), 1)
    assert texts_of(store, " ".join([*many, "fern"])) == []


def test_filters_hold(store):
    assert texts_of(store, "mill", where={"number": {"$gt": 0}}) == [TEXTS[2], TEXTS[4]]
    assert texts_of(store, "mill", where={"document_id": "d0"}) == [TEXTS[0]]
    with pytest.raises(FilterError):
        store.search_text("mill", 3, {"number": {"$like": 1}})


def test_the_index_follows_every_change(store, url):
    with DocumentStore.open(url) as other:  # opened before there is an index
        assert texts_of(store, "club")
        put(other, "d3", ["heron"])
        put(other, "new", ["heron heron pond", "club pond"])
        assert set(texts_of(store, "heron")) == {"heron", "heron heron pond"}
        assert TEXTS[3] not in texts_of(store, "club")
        assert "club pond" in texts_of(other, "club")
        store.delete_documents(["new"])
        assert texts_of(other, "heron pond") == ["heron"]
        store.move_document("d3", "moved", StoredVersion("hash", "s", None), ["moved#0"])
        assert texts_of(store, "heron") == ["heron"]


def test_a_store_that_is_only_read_needs_an_index(store, url):
    with DocumentStore.open(url, read_only=True) as reader:
        with pytest.raises(StoreReadOnlyError, match="search='hybrid'"):
            reader.search_text("fox", 3)
        expected = store.search_text("fox", 3)
        assert reader.search_text("fox", 3) == expected


def retrieved(retriever, question, k, **options):
    return [hit.chunk.text for hit in retriever.retrieve(question, k, **options)]


def fused(question, k):
    """Reciprocal rank fusion of both rankings, written out."""
    near = [TEXTS[i] for i in np.argsort(-(EMBEDDER.embed(TEXTS) @ EMBEDDER.embed_query(question)), kind="stable")]
    named = bm25(" ".join(re.findall(r"\w+", question.lower())), TEXTS)
    scores = {
        text: sum(
            1 / (61 + one[: FETCH_FACTOR * k].index(text)) for one in (near, named) if text in one[: FETCH_FACTOR * k]
        )
        for text in TEXTS
    }
    return sorted((text for text in TEXTS if scores[text]), key=lambda text: (-scores[text], TEXTS.index(text)))[:k]


@pytest.fixture
def retriever(tmp_path):
    with DocumentStore.open(tmp_path / "s.sqlite3") as store:
        for number, text in enumerate(TEXTS):
            put(store, f"d{number}", [text], number=number)
        yield Retriever.open(store, tmp_path / "index.faiss", EMBEDDER)


def test_hybrid_fuses_both_rankings(retriever):
    for question, k in product(("fern wolf", "moss club", "bridg"), (1, 3, 7)):
        assert retrieved(retriever, question, k, search="hybrid") == fused(question, k), (question, k)
        assert retrieved(retriever, question, k, search="text") == bm25(question, TEXTS)[:k], (question, k)


def test_scores_stay_inner_products(retriever):
    vector = EMBEDDER.embed_query("fern wolf")
    for search in ("text", "hybrid"):
        for hit in retriever.retrieve("fern wolf", 4, search=search):
            assert hit.score == pytest.approx(float(EMBEDDER.embed([hit.chunk.text])[0] @ vector), abs=1e-6)
    high = max(hit.score for hit in retriever.retrieve("fern wolf", 4, search="hybrid"))
    kept = retriever.retrieve("fern wolf", 4, search="hybrid", score_threshold=high)
    assert [hit.score for hit in kept] == pytest.approx([high])


def test_hybrid_goes_with_filters_and_variety(retriever):
    assert retrieved(retriever, "mill", 5, search="text", filter={"number": {"$gt": 0}}) == [TEXTS[2], TEXTS[4]]
    assert len(retrieved(retriever, "mill fox", 3, search="hybrid", mmr_lambda=0.5)) == 3
    with pytest.raises(FilterError, match="nmber"):
        retriever.retrieve("mill", 5, search="hybrid", filter={"nmber": 1})


def test_what_cannot_be_searched_is_said(retriever):
    with pytest.raises(ConfigError, match="vector, text, hybrid"):
        retriever.retrieve("mill", search="bm25")
    with pytest.raises(ConfigError, match="give its text"):
        retriever.retrieve(EMBEDDER.embed_query("mill"), search="hybrid")


def test_words_are_found_where_no_spaces_part_them(url):
    texts = {
        "ja": "会議は来週の木曜日に大阪で行われます。",
        "zh": "公司的报销流程需要主管签字。",
        "th": "ประชาชนต้องเคารพกฎหมายไทย",
        "en": "The harbour office opens at nine.",
    }
    with DocumentStore.open(url) as store:
        for found, questions in {
            "ja": ("大阪", "会議はどこで", "木曜日"), "zh": ["报销流程"], "th": ["กฎหมาย"], "en": ["harbour第3章"]
        }.items():  # fmt: skip
            for id, text in texts.items():
                put(store, id, [text])
            assert [texts_of(store, question)[0] for question in questions] == [texts[found]] * len(questions)
            put(store, found, ["other words"])  # replaced: the index follows
            assert not any(texts[found] in texts_of(store, question) for question in questions)


def test_an_index_of_words_between_spaces_is_replaced(url):
    """What the version before made: a store goes on, and its first search makes the index anew."""
    with DocumentStore.open(url) as store:
        put(store, "ja", ["会議は大阪で行われます。"])
        with store.database.write() as connection:
            for statement in OLD[store.database.dialect]:
                connection.execute(text(statement))
        put(store, "more", ["大阪 river"])
        assert texts_of(store, "大阪") == ["大阪 river", "会議は大阪で行われます。"]
        put(store, "more", ["club"])
        assert texts_of(store, "大阪") == ["会議は大阪で行われます。"]
