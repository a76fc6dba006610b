"""The retriever over a real store: what it finds by vectors, by words (BM25 against NumPy) and by both rankings fused,
and how it and the index of words keep up with other processes."""

import logging
import math
import re
import shutil
from functools import partial
from itertools import product

import numpy as np
import pytest
from kit.makers import databases, each
from postgres_server import pgvector_schema
from waiting import beside

from ragcache.errors import ConfigError, EmbedderMismatchError, FilterError, PromptError, StoreReadOnlyError
from ragcache.retrieval.retriever import FETCH_FACTOR, Retriever
from ragcache.retrieval.vector_index import VectorIndex
from ragcache.store.documents import DocumentStore
from ragcache.store.records import NewChunk, NewDocument, StoredVersion
from ragcache.store.text_search import WORDS
from ragcache_demo.bag_of_words import BagOfWords

TOWNS = ["Tolvik", "Osby", "Alna", "Berg", "Holm", "Mora", "Lund", "Vik"]
TEXTS = [f"{town} has a {thing}." for town in TOWNS for thing in ("river", "mill", "club")]
EMBEDDER = BagOfWords()


def put(documents: DocumentStore, id: str, texts: list[str], **metadata: object) -> list[int]:
    vectors = EMBEDDER.embed(texts)
    chunks = [
        NewChunk(f"{id}#{n}", t, [1], v, handle=f"{n:064x}")
        for n, (t, v) in enumerate(zip(texts, vectors, strict=True))
    ]
    return documents.replace_document(NewDocument(id, metadata=metadata), chunks)


kind = each(["flat", "hnsw", "pgvector"])


def fill(store: DocumentStore, texts: list[str] = TEXTS) -> None:
    for n, text in enumerate(texts):
        put(store, f"d{n}", [text], town=text.split()[0], number=n)


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    path = tmp_path_factory.mktemp("filled") / "store.sqlite3"
    with DocumentStore.open(path) as store:
        fill(store)
    return path


@pytest.fixture
def database(request, tmp_path, filled):
    """SQLite, but PostgreSQL for the kind that lives there."""
    if "kind" in request.fixturenames and request.getfixturevalue("kind") == "pgvector":
        for url in pgvector_schema():
            with DocumentStore.open(url) as store:
                fill(store)
            yield url
    else:
        yield shutil.copy(filled, tmp_path)


@pytest.fixture
def documents(database):
    with DocumentStore.open(database) as store:
        yield store


@pytest.fixture
def retriever(kind, documents, tmp_path):
    return Retriever.open(documents, tmp_path / "index.faiss", BagOfWords(), kind=kind)


def brute_force(query: str, texts: list[str] = TEXTS) -> list[str]:
    return [texts[i] for i in np.argsort(-(EMBEDDER.embed(texts) @ EMBEDDER.embed_query(query)), kind="stable")]


def found(retriever: Retriever, query: str, k: int = 5, **options: object) -> list[str]:
    return [hit.chunk.text for hit in retriever.retrieve(query, k, **options)]


def test_hits_are_the_nearest_chunks_with_score_and_handle(retriever):
    hits = retriever.retrieve("which river is in Osby", 7)
    assert [hit.chunk.text for hit in hits] == brute_force("which river is in Osby")[:7]
    assert hits[0].chunk.text == "Osby has a river."
    for hit in hits:
        expected = float(EMBEDDER.embed_query(hit.chunk.text) @ EMBEDDER.embed_query("which river is in Osby"))
        assert hit.score == pytest.approx(expected, abs=1e-6)
        assert hit.handle == hit.chunk.handle == f"{0:064x}"


def test_filters_keep_k_exact(retriever):
    assert found(retriever, "the Osby club", 3, filter={"town": "Lund"}) == brute_force(
        "the Osby club", [text for text in TEXTS if text.startswith("Lund")]
    )
    assert found(retriever, "club", 99, filter={"number": {"$lt": 4}}) == brute_force("club", TEXTS[:4])
    assert found(retriever, "club", 3, filter={"town": "Nowhere"}) == []
    assert len(found(retriever, "club", 9, filter={})) == 9
    with pytest.raises(FilterError):
        retriever.retrieve("club", filter={"town": {"$like": "x"}})


def test_a_score_threshold_leaves_out_what_is_below(retriever):
    all_hits = retriever.retrieve("Osby river", 100)
    threshold = all_hits[4].score
    assert retriever.retrieve("Osby river", 100, score_threshold=threshold) == all_hits[:5]
    assert retriever.retrieve("Osby river", 3, score_threshold=threshold) == all_hits[:3]
    assert retriever.retrieve("Osby river", 3, score_threshold=1.5) == []


def test_mmr_of_one_is_the_ranking_and_less_avoids_copies(retriever, documents):
    assert found(retriever, "Osby river", 6, mmr_lambda=1.0) == found(retriever, "Osby river", 6)
    for n in range(5):
        put(documents, f"copy{n}", ["Osby has a river."])
    assert set(found(retriever, "Osby river", 4)) == {"Osby has a river."}
    varied = found(retriever, "Osby river", 4, mmr_lambda=0.3, fetch_k=29)
    assert varied[0] == "Osby has a river."
    assert len(set(varied)) == 4


def test_what_cannot_be_asked_is_refused(retriever):
    for query, k, options, error, message in (
        ("x", 0, {}, ConfigError, "k is 0"),
        ("x", -3, {}, ConfigError, "k is -3"),
        ("x", 2, {"mmr_lambda": 1.1}, ConfigError, "mmr_lambda"),
        ("x", 2, {"mmr_lambda": 0.5, "fetch_k": 1}, ConfigError, "fetch_k"),
        ("", 2, {}, PromptError, "empty"),
        ("  \n", 2, {}, PromptError, "empty"),
        ("x", 2, {"search": "bm25"}, ConfigError, "vector, text, hybrid"),
        (EMBEDDER.embed_query("x"), 2, {"search": "hybrid"}, ConfigError, "give its text"),
    ):
        with pytest.raises(error, match=message):
            retriever.retrieve(query, k, **options)


def test_an_empty_store_has_no_hits(tmp_path):
    with DocumentStore.open(tmp_path / "s.sqlite3") as empty:
        assert Retriever.open(empty, tmp_path / "i", BagOfWords()).retrieve("x", 3) == []


def test_commits_of_others_are_seen_at_the_next_question(retriever, database):
    with DocumentStore.open(database) as other:
        put(other, "new", ["Tolvik has a lighthouse.", "Osby has an airport."])
        assert found(retriever, "lighthouse", 1) == ["Tolvik has a lighthouse."]
        put(other, "new", ["Osby has an airport."])
        assert "Tolvik has a lighthouse." not in found(retriever, "lighthouse", 100)
        other.delete_documents(["new"])
    assert sorted(found(retriever, "airport", 100)) == sorted(TEXTS)


def test_a_saved_index_is_used_and_a_stale_one_brought_up_to_date(documents, tmp_path, monkeypatch):
    path = tmp_path / "index.faiss"
    first = Retriever.open(documents, path, BagOfWords())
    assert not path.exists()
    first.save(path)
    read = []
    original = documents.all_vectors
    monkeypatch.setattr(documents, "all_vectors", lambda **options: read.append(options) or original(**options))
    again = Retriever.open(documents, path, BagOfWords())
    assert read == []
    assert found(again, "Osby river", 24) == found(first, "Osby river", 24)
    ids = put(documents, "new", ["Tolvik has a lighthouse."])
    documents.delete_documents(["d0"])
    late = Retriever.open(documents, path, BagOfWords())
    assert read == [{"after": ids[0] - 1}]
    assert found(late, "lighthouse", 1) == ["Tolvik has a lighthouse."]
    assert late.index.ids == documents.vector_ids()


def test_a_damaged_index_is_reported_and_rebuilt(documents, tmp_path, caplog):
    path = tmp_path / "index.faiss"
    Retriever.open(documents, path, BagOfWords()).save(path)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)
    with caplog.at_level(logging.WARNING):
        retriever = Retriever.open(documents, path, BagOfWords())
    assert "not sealed" in caplog.text
    assert found(retriever, "Osby river", 5) == brute_force("Osby river")[:5]


@pytest.mark.parametrize("other", [BagOfWords("another"), BagOfWords(dimension=12)])
def test_another_embedder_is_refused(documents, tmp_path, other):
    Retriever.open(documents, tmp_path / "i", BagOfWords())
    with pytest.raises(EmbedderMismatchError, match="made with"):
        Retriever.open(documents, tmp_path / "i", other)


def test_an_index_of_another_kind_or_embedder_is_not_used(documents, tmp_path):
    path = tmp_path / "index.faiss"
    Retriever.open(documents, path, BagOfWords()).save(path)
    assert Retriever.open(documents, path, BagOfWords(), kind="hnsw").index.kind == "hnsw"
    with pytest.raises(ConfigError, match="another"):
        Retriever(documents, VectorIndex(24, embedder="another"), BagOfWords())


def test_apply_takes_in_a_commit_without_reading_vectors(documents, tmp_path, monkeypatch):
    retriever = Retriever.open(documents, tmp_path / "i", BagOfWords())
    monkeypatch.setattr(documents, "all_vectors", None)
    ids = put(documents, "new", ["Tolvik has a lighthouse."])
    retriever.apply(ids, EMBEDDER.embed(["Tolvik has a lighthouse."]), [])
    assert found(retriever, "lighthouse", 1) == ["Tolvik has a lighthouse."]
    assert retriever.index.generation == documents.generation()
    documents.delete_documents(["new"])
    retriever.apply([], np.empty((0, 24), np.float32), ids)
    assert retriever.index.ids == documents.vector_ids()


def test_apply_does_not_hide_a_commit_of_someone_else(documents, database, tmp_path):
    retriever = Retriever.open(documents, tmp_path / "i", BagOfWords())
    with DocumentStore.open(database) as other:
        put(other, "theirs", ["Osby has an airport."])
    ids = put(documents, "ours", ["Tolvik has a lighthouse."])
    retriever.apply(ids, EMBEDDER.embed(["Tolvik has a lighthouse."]), [])
    assert found(retriever, "airport", 1) == ["Osby has an airport."]


def test_readers_beside_a_writer_always_get_k_living_chunks(retriever, database):
    def read(query: str, **options: object) -> None:
        hits = retriever.retrieve(query, 10, **options)
        assert len(hits) == 10
        assert len({hit.chunk.vector_id for hit in hits}) == 10
        assert {"Osby has a river.", "Osby has a mill."} & {hit.chunk.text for hit in hits}

    varied, few = (
        partial(read, "Osby mill", **more) for more in ({"mmr_lambda": 0.7}, {"filter": {"number": {"$lt": 20}}})
    )
    with DocumentStore.open(database) as writer, beside(partial(read, "Osby river"), varied, few):
        for n in range(15):
            put(writer, f"new{n % 3}", [f"Osby has a river {n}."] * (n % 4))
            if n % 5 == 4:
                writer.delete_documents(["new0", "new1"])
    assert retriever.refresh() in (True, False)
    assert retriever.index.ids == retriever.documents.vector_ids()


def test_a_filter_that_nothing_passes_for_a_misspelt_field_says_so(retriever, documents):
    with pytest.raises(FilterError, match=r"no passage has metadata field 'twon'.*have: number, town"):
        retriever.retrieve("river", filter={"$or": [{"twon": "Osby"}, {"$not": {"number": {"$gte": 0}}}]})
    assert retriever.retrieve("river", filter={"town": "Nowhere"}) == []
    assert retriever.retrieve("river", filter={"_collection": "rivers"}) == []  # a framework's own
    assert len(retriever.retrieve("river", filter={"twon": {"$exists": False}})) == 5
    documents.delete_documents([f"d{n}" for n in range(len(TEXTS))])
    assert retriever.retrieve("river", filter={"twon": "Osby"}) == []
    put(documents, "bare", ["A river."])
    with pytest.raises(FilterError, match="have: source, title, document_id, chunk_id"):
        retriever.retrieve("river", filter={"town": "Osby"})


def test_the_nearest_are_foreseen_before_their_texts_are_read(retriever, documents, monkeypatch):
    put(documents, "pending", ["Osby has nothing at all."])
    pending = documents.chunks_of("pending")[0].vector_id
    documents.set_handles({pending: None})
    told, read = [], documents.chunks_by_vector_ids
    monkeypatch.setattr(documents, "chunks_by_vector_ids", lambda ids: [told.append("texts"), *read(ids)][1:])
    monkeypatch.setattr(documents, "handles_by_vector_ids", lambda ids: [by_id[id] for id in ids if id in by_id])
    by_id = {
        chunk.vector_id: f"{chunk.document_id}" for n in range(len(TEXTS)) for chunk in documents.chunks_of(f"d{n}")
    }
    hits = retriever.retrieve("Osby has a mill", 4, mmr_lambda=0.1, fetch_k=12, on_candidates=told.append)
    nearest = [f"d{TEXTS.index(text)}" for text in brute_force("Osby has a mill")[:5]]
    assert told[0] == [id for id in told[0] if id in nearest]
    assert told[1] == "texts"
    assert told[0] != [hit.chunk.document_id for hit in hits], "variety chose others"


def test_handles_are_found_by_vector_ids_in_their_order(documents):
    ids = [documents.chunks_of(f"d{n}")[0].vector_id for n in (3, 0, 2)]
    documents.set_handles(dict(zip(ids, ("a" * 64, "b" * 64, None), strict=True)))
    assert documents.handles_by_vector_ids([*ids, 10**6]) == ["a" * 64, "b" * 64]
    assert documents.handles_by_vector_ids([]) == []


# By words, and an index of them that follows every change


# No word of these is changed by stemming, and none is a stop word.
STEMS = [
    "bridg mill mill river",
    "river club fox",
    "mill fox fox fox wolf wolf",
    "club",
    "wolf river river mill club fox bridg moss fern",
    "fern moss",
    "moss moss moss",
]


url = databases()


@pytest.fixture
def store(url):
    with DocumentStore.open(url) as opened:
        fill(opened, STEMS)
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


def test_any_word_of_the_question_counts_in_any_form(store):
    assert set(texts_of(store, "Where is a WOLF, or a fern?")) == {STEMS[2], STEMS[4], STEMS[5]}
    assert texts_of(store, "moss")[0] == STEMS[6]
    assert set(texts_of(store, "the foxes")) == {STEMS[1], STEMS[2], STEMS[4]}
    assert len(store.search_text("river mill club", 2)) == 2
    assert texts_of(store, "zebra") == []


def test_no_question_breaks_the_querys_syntax(store):
    for question in ("?!", "", '"', "fox\"' OR NEAR(wolf* AND -x ^", "a:b (c | d) & !e <-> f", "x" * 10**5):
        assert set(texts_of(store, question)) <= set(STEMS), question


def test_a_question_is_looked_for_by_its_first_words(store):
    many = [f"word{number}" for number in range(WORDS)]
    assert texts_of(store, " ".join([*many[1:], "fern"]), 1)
    assert texts_of(store, " ".join([*many, "fern"])) == []


def test_filters_hold(store):
    assert texts_of(store, "mill", where={"number": {"$gt": 0}}) == [STEMS[2], STEMS[4]]
    assert texts_of(store, "mill", where={"document_id": "d0"}) == [STEMS[0]]
    with pytest.raises(FilterError):
        store.search_text("mill", 3, {"number": {"$like": 1}})


def test_the_index_follows_every_change(store, url):
    with DocumentStore.open(url) as other:  # opened before there is an index
        assert texts_of(store, "club")
        put(other, "d3", ["heron"])
        put(other, "new", ["heron heron pond", "club pond"])
        assert set(texts_of(store, "heron")) == {"heron", "heron heron pond"}
        assert STEMS[3] not in texts_of(store, "club")
        assert "club pond" in texts_of(other, "club")
        store.delete_documents(["new"])
        assert texts_of(other, "heron pond") == ["heron"]
        store.move_document("d3", "moved", StoredVersion("hash", "s", ""), ["moved#0"])
        assert texts_of(store, "heron") == ["heron"]


def test_a_store_that_is_only_read_needs_an_index(store, url):
    with DocumentStore.open(url, read_only=True) as reader:
        with pytest.raises(StoreReadOnlyError, match="search='hybrid'"):
            reader.search_text("fox", 3)
        expected = store.search_text("fox", 3)
        assert reader.search_text("fox", 3) == expected


def fused(question, k):
    """Reciprocal rank fusion of both rankings, written out."""
    near = brute_force(question, STEMS)
    named = bm25(" ".join(re.findall(r"\w+", question.lower())), STEMS)
    scores = {
        text: sum(
            1 / (61 + one[: FETCH_FACTOR * k].index(text)) for one in (near, named) if text in one[: FETCH_FACTOR * k]
        )
        for text in STEMS
    }
    return sorted((text for text in STEMS if scores[text]), key=lambda text: (-scores[text], STEMS.index(text)))[:k]


@pytest.fixture
def hybrid(tmp_path):
    with DocumentStore.open(tmp_path / "s.sqlite3") as store:
        fill(store, STEMS)
        yield Retriever.open(store, tmp_path / "index.faiss", EMBEDDER)


def test_hybrid_fuses_both_rankings(hybrid):
    questions = ("moss", "fern wolf", "moss club", "bridg", "bridg fox moss", "club wolf fern moss", "moss moss river")
    for question, k in product(questions, (1, 3, 7)):
        assert found(hybrid, question, k, search="hybrid") == fused(question, k), (question, k)
        assert found(hybrid, question, k, search="text") == bm25(question, STEMS)[:k], (question, k)


def test_scores_stay_inner_products(hybrid):
    vector = EMBEDDER.embed_query("fern wolf")
    for search in ("text", "hybrid"):
        for hit in hybrid.retrieve("fern wolf", 4, search=search):
            assert hit.score == pytest.approx(float(EMBEDDER.embed([hit.chunk.text])[0] @ vector), abs=1e-6)
    high = max(hit.score for hit in hybrid.retrieve("fern wolf", 4, search="hybrid"))
    kept = hybrid.retrieve("fern wolf", 4, search="hybrid", score_threshold=high)
    assert [hit.score for hit in kept] == pytest.approx([high])


def test_hybrid_goes_with_filters_and_variety(hybrid):
    assert found(hybrid, "mill", 5, search="text", filter={"number": {"$gt": 0}}) == [STEMS[2], STEMS[4]]
    assert len(found(hybrid, "mill fox", 3, search="hybrid", mmr_lambda=0.5)) == 3
    with pytest.raises(FilterError, match="nmber"):
        hybrid.retrieve("mill", 5, search="hybrid", filter={"nmber": 1})


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


PARTS = [
    ("Write to info@heron.example for a berth.", ["info@heron.example", "heron", "HERON"]),
    ("The file harbour/fees.md has them.", ["fees.md", "fees", "harbour/fees.md"]),
    ("Version v1.10.3 mends it.", ["v1.10.3", "v1"]),
    ("The part AB-1234 fits every boat.", ["AB-1234", "1234", "ab 1234"]),
    ("It was -12 degrees, or +7.", ["12", "-12", "7"]),
    ("The IT office is open.", ["IT"]),
    ("A ﬁne café in ＴＯＫＹＯ.", ["fine", "cafe", "café", "tokyo", "cafe\u0301"]),
    ("See http://pier.example/a_b?x=9.", ["pier", "a_b", "b", "9"]),
]


@pytest.mark.parametrize(("text", "queries"), PARTS)
def test_parts_of_addresses_codes_and_numbers_are_found_on_both_databases(url, text, queries):
    with DocumentStore.open(url) as store:
        fill(store, [text, "Nothing of the kind stands here, whoever looks."])
        assert [texts_of(store, query) for query in queries] == [[text]] * len(queries)
