"""Collections: what a view shows, what it changes, and whose KV a question finds."""

import pytest
from engine_texts import TEXTS

import ragcache as rc
from ragcache.errors import ConfigError, NoSuchCollectionError, NotAllowedError
from ragcache.store.collections import OTHERS, View

CATS, RIVERS, TOWNS = TEXTS["cats"], TEXTS["rivers"], TEXTS["clubs"]
SHORT = rc.Sampling(max_tokens=2)
QUESTION = "Where does the cat sit?"


@pytest.fixture
def both(open_kb):
    """A store of collections "a" and "b", each with the document "one" of another text, and of `default`."""
    kb = open_kb()
    kb.ingest(rc.Document("one", TOWNS, {"of": "default"}))
    for name, text in (("a", CATS), ("b", RIVERS)):
        kb.collection(name).ingest(rc.Document("one", text, {"of": name}))
    return kb


def ids(kb):
    return [(one.collection, one.id) for one in kb.documents()]


def test_documents_have_ids_of_their_own_in_each_collection(both):
    assert ids(both) == [("a", "one"), ("b", "one"), ("default", "one")]
    assert both.collections() == ["a", "b", "default"]
    for name, text in (("a", CATS), ("b", RIVERS)):
        seen = both.collection(name)
        assert ids(seen) == [(name, "one")]
        assert "".join(chunk.text for chunk in seen.chunks_of("one")).strip() == text.strip()
        assert {hit.chunk.collection for hit in seen.retrieve(QUESTION, 9)} == {name}
        assert {hit.chunk.collection for hit in seen.retrieve(QUESTION, 9, search="hybrid")} == {name}
        assert {hit.chunk.collection for hit in seen.retrieve(QUESTION, 9, search="text")} <= {name}
        assert seen.info().documents == 1
    report = both.collection("a").ingest(rc.Document("one", TOWNS))
    assert report.updated == ["one"]
    assert both.collection("b").document("one").metadata == {"of": "b"}


@pytest.mark.parametrize("search", ["vector", "text", "hybrid"])
def test_an_answer_reads_passages_of_its_collection_alone(both, search):
    for name in ("a", "b", "default"):
        answer = both.collection(name).ask(QUESTION, 9, search=search, sampling=SHORT)
        assert {source.chunk.collection for source in answer.hits} <= {name}
    hits = both.retrieve(QUESTION, 9)
    theirs = next(hit for hit in hits if hit.chunk.collection == "b")
    seen = both.collection("a")
    assert seen.chunks([theirs.chunk.id])[0].collection == "a"
    for passage in (rc.Passage(handle=theirs.handle), rc.Passage(id="nothing", handle=theirs.handle)):
        with pytest.raises(rc.UnknownHandleError):
            seen.ask(QUESTION, hits=[passage], sampling=SHORT)
    own = seen.ask(QUESTION, hits=[rc.Passage(RIVERS, handle=theirs.handle)], sampling=SHORT).hits[0]
    assert (own.kv, own.handle == theirs.handle) == ("computed", False)


def test_a_deletion_stays_within_its_collection(both):
    assert both.collection("a").delete(["one"]) == ["one"]
    assert ids(both) == [("b", "one"), ("default", "one")]
    assert both.collection("b").delete(filter={"of": "b"}) == ["one"]
    assert both.delete_collection("b") == []
    with pytest.raises(NoSuchCollectionError, match="no collection 'b'"):
        both.collection("b", create=False)
    assert both.collections() == ["a", "default"]


def test_equal_texts_have_other_blocks_in_another_collection(open_kb):
    kb = open_kb()
    for name in ("a", "b", "default"):
        kb.collection(name).ingest(rc.Document("same", CATS))
    for name in ("p", "q"):
        kb.collection(name, public=True).ingest(rc.Document("same", CATS))
    handles = [kb.collection(name).chunks_of("same")[0].handle for name in ("a", "b", "default", "p", "q")]
    assert len(set(handles)) == 3
    assert handles[2:] == [handles[2]] * 3  # public ones share theirs


def test_a_collection_made_again_finds_nothing_of_the_former(both):
    before = both.collection("a").chunks_of("one")[0].handle
    both.delete_collection("a")
    both.collection("a").ingest(rc.Document("one", CATS))
    assert both.collection("a").chunks_of("one")[0].handle != before


def test_a_views_prompts_are_found_by_no_other(both):
    prompt = "A prompt of many words that nobody else knows, and that goes on for quite a while."

    def cached(kb):
        return kb.complete(prompt, method="full", sampling=SHORT).usage.cached_tokens

    a, b = both.collection("a"), both.collection("b")
    assert cached(a) == 0
    assert cached(b) == 0
    assert cached(both) == 0
    assert cached(a) > 10
    assert cached(both.collection("a")) > 10
    two = both.seen_by(View(frozenset("ab"), frozenset("a"), "a"))
    assert cached(two) == 0
    assert cached(both.seen_by(View(frozenset(["default"]), frozenset()))) == 0


def test_given_passages_are_found_by_their_view_alone(both):
    passage = rc.Passage(RIVERS[::-1])

    def origin(kb):
        return kb.ask(QUESTION, hits=[passage], sampling=SHORT).hits[0].kv

    a, b = both.collection("a"), both.collection("b")
    assert origin(a) == "computed"
    assert origin(b) == "computed"
    assert origin(both) == "computed"
    assert origin(a) == origin(b) != "computed"


def test_estimates_and_orders_are_learnt_by_each_view(both):
    long = "word " * 60
    both.collection("a").complete(long, method="full", sampling=SHORT)
    assert both.collection("a").full_prefill_samples > 0
    assert both.collection("b").full_prefill_samples == 0


def test_a_view_without_a_place_to_add_to_says_so(both):
    reader = both.seen_by(View(frozenset("a"), frozenset(), None))
    with pytest.raises(NotAllowedError, match="may change no documents"):
        reader.ingest(rc.Document("two", CATS))
    with pytest.raises(NotAllowedError, match="may change no documents"):
        reader.delete(["one"])
    unsure = both.seen_by(View.of("ab", "ab"))
    with pytest.raises(NotAllowedError, match="name the collection to add to: a, b"):
        unsure.ingest(rc.Document("two", CATS))
    assert len(both.documents()) == 3


def test_vector_stores_are_outside_of_everything_else(both):
    both.collection("vs_1").ingest(rc.Document("file", CATS))
    seen = both.seen_by(View.of([OTHERS], [OTHERS]))
    assert ids(seen) == [("a", "one"), ("b", "one"), ("default", "one")]
    assert seen.document("file") is None
    assert seen.delete(["file"]) == []
    with pytest.raises(NoSuchCollectionError):
        seen.collection("vs_1")


@pytest.mark.parametrize("name", ["", "a/b", ".a", "a" * 65, "ä", "a b", "*"])
def test_a_name_that_cannot_be_used_is_refused(both, name):
    with pytest.raises(ConfigError, match="cannot name a collection"):
        both.collection(name)


def test_a_store_without_models_has_collections_too(both):
    with rc.Store.open(both.store.layout.root) as store:
        assert [one.id for one in store.collection("a").documents()] == ["one"]
        assert store.collection("a").delete("one") == ["one"]
        assert store.collections() == ["a", "b", "default"]


def test_neighbours_come_from_the_same_collection(open_kb):
    kb = open_kb(store=rc.StoreConfig(neighbours=1))
    for name in ("a", "b"):
        kb.collection(name).ingest([rc.Document("one", CATS), rc.Document("two", f"{CATS} And {name}.")])
    encoder = kb._parts.block_keys
    for chunk in kb.chunks():
        [near] = encoder.neighbourhood.of([chunk])
        assert {one.collection for one in near} <= {chunk.collection}


def test_neighbours_pass_the_questions_filter(open_kb, tmp_path):
    """A planted passage that the question's filter hides changes no answer."""
    plain, planted = (
        open_kb(tmp_path / "plain", store=rc.StoreConfig(neighbours=1)),
        open_kb(store=rc.StoreConfig(neighbours=1)),
    )
    own = [rc.Document("mine", CATS, {"of": "me"}), rc.Document("more", RIVERS, {"of": "me"})]
    plain.ingest(own)
    planted.ingest([*own, rc.Document("planted", f"{CATS} The cat sits on the moon.", {"of": "you"})])
    asked = {"filter": {"of": "me"}, "sampling": rc.Sampling(max_tokens=8)}
    right = plain.ask(QUESTION, 1, **asked)
    found = planted.ask(QUESTION, 1, **asked)
    assert [hit.chunk.id for hit in right.hits] == [hit.chunk.id for hit in found.hits]
    assert found.text == right.text
    assert planted.ask(QUESTION, 1, sampling=SHORT, filter={"of": "me"}).hits[0].handle == found.hits[0].handle
