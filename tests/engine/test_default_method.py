"""What reads a question that names no method: training, a check, or else the time that full prefill would take."""

import json
import logging
from dataclasses import replace

import pytest
from blocks import same
from kit.makers import tiny_directory, tiny_lm
from tiny_model import LINK

import ragcache as rc
from integrations.remote.tests.vllm_double import VllmDouble, serving
from ragcache.engine import verdict as reasons
from ragcache.engine.verdict import FILE, MethodVerdict, Verdict, load_verdict, save_verdict
from ragcache.errors import ConfigError
from ragcache.fusion import get_method
from ragcache.models.primer import PRIMERS
from ragcache.models.trained_tokens import TrainedTokens
from ragcache_vllm.request_layout import served_name

QUESTION = "Where do dogs bark?"
SHORT = rc.Sampling(max_tokens=8)
WIDE = "cacheblend(ratio=0.3)"
"""What answers call the default of an untrained model."""
PLAIN = MethodVerdict("reposition", {}, "isolated", True, "", 0.05)
EPIC = MethodVerdict("epic", {"first_tokens": 3}, "isolated", True, "", 0.2)
BLEND = MethodVerdict("cacheblend", {"ratio": 0.5}, "isolated", True, "", 0.02)


@pytest.fixture
def unchecked(kb, open_kb):
    """A store with documents, over a model that was neither trained for reuse nor checked."""
    return open_kb(method=None)


linked = tiny_directory(reuse=LINK)


def ask(kb, question=QUESTION, **options) -> rc.Answer:
    return kb.ask(question, **{"k": 3, "sampling": SHORT, **options})


def check(kb, *methods, neighbours=0) -> None:
    verdict = Verdict(kb.lm.fingerprint, "tiny", "tests", 10, {}, methods, neighbours)
    save_verdict(kb.store.layout.root, verdict)


def warnings_of(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


# Neither trained nor checked


@pytest.mark.parametrize("asked", [{}, {"method": "auto"}])
def test_an_untrained_model_is_read_by_cacheblend(unchecked, asked):
    answer = ask(unchecked, **asked)
    wide, narrow = (ask(unchecked, method="cacheblend", method_options=more) for more in ({"ratio": 0.3}, {}))
    assert answer.text == wide.text != narrow.text  # the ratio is seen
    assert (answer.method, narrow.method) == (WIDE, "cacheblend")
    assert "runs the tokens again whose keys and values deviate most" in answer.method_reason
    assert "`ragcache check --store DIR`" in answer.method_reason
    assert {hit.kv for hit in answer.hits} == {"disk"}  # encoded at ingestion
    assert unchecked.method == "auto"


def test_passages_read_behind_neighbours_are_read_by_epic(open_kb, tmp_path):
    kb = open_kb(tmp_path / "near", method=None, store=rc.StoreConfig(neighbours=1))
    kb.ingest([rc.Document(name, f"{name} barks at night in the town of Kelbrook. " * 4) for name in ("Rex", "Fido")])
    answer = ask(kb, k=2)
    assert (answer.method, answer.method_reason) == ("epic", reasons.by_default(get_method("epic")))


SHORT_CHUNKS = rc.ChunkerConfig(max_tokens=16, min_tokens=1)
TEXTS = {
    "d0": "Rex barks at night in Kelbrook. " * 6,
    "d1": "Fido sleeps under the old bridge. " * 6,
    "d2": "Bello swims across a cold lake. " * 6,
    "d3": "Argos waits beside his empty gate. " * 6,
}
long_lm = tiny_lm(positions=4096)


def test_a_shared_stores_company_is_of_the_same_document(open_kb, tmp_path, long_lm):
    """However similar another document is, and whoever opens the store later."""
    options = {"model": long_lm, "method": None, "chunker": SHORT_CHUNKS, "texts": TEXTS}
    for store in (rc.StoreConfig(is_shared=True), rc.StoreConfig()):
        with open_kb(tmp_path / "new", store=store, **options) as kb:
            by_document = [kb.chunks_of(one.id) for one in kb.documents()]
            assert (kb.info().neighbours, kb.info().neighbours_from) == (2, "document")
            for chunks in by_document:
                ids = [tuple(chunk.token_ids) for chunk in chunks]
                near = [chunk.neighbours for chunk in kb._parts.block_keys.with_neighbours(chunks)]
                assert near == [tuple(ids[max(0, rank - 2) : rank]) for rank in range(len(ids))]
                assert len(ids) > 2


def test_a_new_store_of_an_untrained_model_encodes_passages_in_company(open_kb, tmp_path, long_lm):
    """Behind the shortest primer and two neighbours, whoever opens it later; against blocks made by hand."""
    with open_kb(tmp_path / "new", model=long_lm, method=None, texts=TEXTS) as kb:
        found = kb.info()
        chunks = kb.store.documents.chunks([f"{id}#0" for id in TEXTS])
    assert (found.neighbours, found.neighbours_from, found.pending) == (2, "similarity", 0)
    assert found.primer_tokens == len(long_lm.recipe(rc.Recipe("primer", primer="64")).primer_ids)
    with open_kb(tmp_path / "new", model=long_lm, method="reposition") as kb:  # as it was made
        assert kb.info().neighbours == 2
        (hit,) = kb.retrieve("Where does Rex bark?", 1)
        near = kb._parts.block_keys.with_neighbours([hit.chunk])[0].neighbours
        recipe = rc.Recipe("primer", primer=PRIMERS["64"], neighbours=2)
        (own,) = long_lm.encode([hit.chunk.token_ids], recipe, kb._parts.block_keys.prefix_ids, neighbours=[near])
        assert {tuple(one) for one in near} <= {tuple(one.token_ids) for one in chunks} - {tuple(hit.chunk.token_ids)}
        assert len(near) == 2
        stored = kb.store.kv.get(hit.chunk.handle)
        assert stored is not None
        assert same(stored.block, own)


@pytest.mark.parametrize(("recipe", "neighbours"), [("primer", 2), ("prefix", 0)])
def test_a_model_trained_behind_a_primer_reads_in_company_too(
    open_kb, tmp_path, long_lm, recipe, neighbours, monkeypatch
):
    monkeypatch.setattr(long_lm, "reuse", TrainedTokens("reposition", recipe=recipe))
    with open_kb(tmp_path / "new", model=long_lm, method=None, texts=TEXTS) as kb:
        assert kb.info().neighbours == neighbours
        answer = kb.ask("Where does Rex bark?", k=3, sampling=SHORT)
    assert answer.method == "reposition"
    assert {hit.kv for hit in answer.hits} <= {"disk", "memory"}


def test_who_asks_for_something_else_gets_that(open_kb, tmp_path, linked, long_lm):
    asked = [
        {"store": rc.StoreConfig(neighbours=0)},
        {"recipe": "isolated"},
        {"recipe": "prefix"},
        {"method": "reposition"},
        {"model": rc.load_lm(str(linked), dtype="float32")},
    ]
    for number, options in enumerate(asked):
        options = {"model": long_lm, "method": None, **options}
        with open_kb(tmp_path / str(number), **options) as kb:
            assert (kb.info().neighbours, kb.info().primer_tokens) == (0, 0), options
        if number < 3:  # what is not empty stays as it was made
            with open_kb(tmp_path / str(number), **options) as kb:
                kb.precompute([rc.Document("d", TEXTS["d0"])])
            with open_kb(tmp_path / str(number), model=long_lm, method=None) as kb:
                assert kb.info().neighbours == 0, options


def test_full_prefill_reads_what_it_runs_no_more_tokens_of(kb, unchecked):
    """After full prefill read a prompt, the same prompt costs it one token; of a new one it would run every passage."""
    exact = ask(unchecked, method="full")
    again = ask(unchecked)
    assert (again.method, again.text) == ("full", exact.text)
    assert "full prefill would run no more of this prompt's tokens than reuse" in again.method_reason
    assert {hit.kv for hit in again.hits} == {"exact"}
    assert ask(unchecked, "Who meets on Monday in the town of Kelbrook, and where do they row?").method == WIDE


def test_the_order_that_shares_most_is_what_full_prefill_would_read(unchecked):
    hits = unchecked.retrieve(QUESTION, 3)
    ask(unchecked, hits=hits, order="shared", hint=False, method="full")
    assert ask(unchecked, hits=hits[::-1], order="shared", hint=False).method == "full"
    assert ask(unchecked, hits=hits[::-1]).method == WIDE


def test_where_no_passage_comes_the_prompt_is_read_exactly(unchecked):
    hits = unchecked.retrieve(QUESTION, 2)
    bare = unchecked.chat([{"role": "user", "content": "Hello"}], sampling=SHORT)
    assert (bare.method, bare.method_reason) == ("full", reasons.NOTHING_TO_REUSE)
    labelled = unchecked.complete(["[1] ", hits[0], "[2] ", hits[1], "Well?"], sampling=SHORT)
    assert labelled.method == WIDE
    kept = unchecked.chat([{"role": "user", "content": QUESTION}], k=2, context="keep", sampling=SHORT)
    assert kept.method == WIDE


def test_a_stream_names_the_method_before_it_reads(unchecked):
    sources, *_, done = unchecked.stream(QUESTION, k=3, sampling=SHORT)
    told = (done.answer.method, done.answer.method_reason)
    assert (sources.method, sources.method_reason) == told
    assert told[0] == WIDE
    assert done.answer.to_json()["method_reason"] == told[1]


def test_the_first_lossy_answer_says_so_once(unchecked, caplog):
    ask(unchecked, method="full")
    assert warnings_of(caplog) == []
    answers = [ask(unchecked, f"{name}: {QUESTION}") for name in ("Mary", "John")]
    assert [one.method for one in answers] == [WIDE] * 2
    (said,) = warnings_of(caplog)
    assert "not trained for reuse" in said
    assert "cacheblend" in said
    assert f"ragcache check --store {unchecked.store.layout.root}" in said


def test_a_method_asked_for_is_what_it_says(kb, unchecked, caplog):
    """It is named, it is never replaced, and it says once, too, that nobody checked it."""
    for answer in (ask(kb), ask(unchecked, method="reposition"), ask(unchecked, method_options={"ratio": 0.5})):
        assert answer.method in ("reposition", "cacheblend(ratio=0.5)")
        assert answer.method_reason == reasons.ASKED_UNCHECKED
    assert ask(kb, method="full").method_reason == reasons.ASKED
    assert len(warnings_of(caplog)) == 2  # two stores were opened
    with pytest.raises(ConfigError, match=r"auto.*no options.*ratio"):
        ask(unchecked, method="auto", method_options={"ratio": 0.5})


# Checked


def test_a_verdict_that_stands_decides(kb, open_kb, caplog):
    check(kb, EPIC)
    for method in (None, "auto"):
        answer = ask(open_kb(method=method))
        assert (answer.method, answer.method_reason) == ("epic(first_tokens=3)", reasons.CHEAPEST)
    assert open_kb(method="auto")._parts.choice.method == get_method("epic", first_tokens=3)
    assert ask(kb, method="auto").method == "epic(first_tokens=3)"
    assert open_kb(method=None).complete("Hello", sampling=SHORT).method == "full"
    assert warnings_of(caplog) == []
    check(kb)
    answer = ask(open_kb(method=None))
    assert (answer.method, answer.method_reason) == ("full", reasons.NONE_SAFE)
    assert "no method passed" in warnings_of(caplog)[-1]


def test_a_verdict_over_other_blocks_does_not_stand(kb, open_kb, caplog):
    check(kb, EPIC, neighbours=1)
    answer = ask(open_kb(method=None))
    assert answer.method == WIDE
    assert answer.method_reason.startswith("The model was neither trained for reuse nor checked")
    assert any(
        "read behind 1 others and a primer of 0 tokens each" in said and "ragcache check" in said
        for said in warnings_of(caplog)
    )


# Trained


def test_a_model_trained_for_reuse_is_read_as_trained(open_kb, linked, tmp_path, caplog):
    kb = open_kb(tmp_path / "linked", model=linked)
    kb.ingest([rc.Document("dogs", "Dogs bark at night in the town of Kelbrook."), rc.Document("cats", "Cats sleep.")])
    for method in (None, "auto"):
        answer = ask(kb, k=2, method=method)
        assert (answer.method, answer.method_reason) == ("link", reasons.TRAINED)
    check(kb, PLAIN)
    again = open_kb(tmp_path / "linked", model=linked)
    assert [ask(again, k=2, method=method).method for method in (None, "auto")] == ["link", "reposition"]
    assert warnings_of(caplog) == []


# Elsewhere


def test_another_engine_reads_exactly_or_by_a_checked_method_that_it_can(kb, open_kb):
    ids = kb.lm.tokenizer("On Monday.", add_special_tokens=False)["input_ids"]
    with serving(VllmDouble(served_name(kb.lm.fingerprint), ids)) as vllm:
        there = {"model": None, "engine": vllm.url, "method": None}
        answer = ask(open_kb(**there))
        assert (answer.method, answer.method_reason) == ("full", reasons.cannot_read_blocks(get_method("cacheblend")))
        check(kb, BLEND, EPIC)
        assert ask(open_kb(**there)).method == "epic(first_tokens=3)"
        assert ask(open_kb(method=None)).method == "cacheblend(ratio=0.5)"


# What `ragcache check` found


CHEAP = MethodVerdict("concat", {}, "isolated", False, "top-1 agreement 0.5 is below 0.95", 0.05)
SAFE = MethodVerdict("epic", {"first_tokens": 3}, "isolated", True, "", 0.2, {"kl_answer": 0.01})
DEARER = MethodVerdict("epic", {"first_tokens": 9}, "prefix", True, "", 0.4, {"kl_answer": 0.0})


@pytest.fixture
def verdict(lm) -> Verdict:
    return Verdict(lm.fingerprint, "tiny", "tests", 10, {"min_agreement": 0.95}, (CHEAP, DEARER, SAFE))


def test_it_survives_the_disk(tmp_path, verdict):
    save_verdict(tmp_path, verdict)
    save_verdict(tmp_path, replace(verdict, fingerprint="other", methods=()))
    assert load_verdict(tmp_path, verdict.fingerprint) == verdict
    assert load_verdict(tmp_path, "other").methods == ()
    assert load_verdict(tmp_path, "third") is None


def test_the_best_is_the_cheapest_safe_one_of_the_recipe(verdict):
    assert verdict.best() == SAFE
    assert verdict.best("prefix") == DEARER
    assert replace(verdict, methods=(CHEAP,)).best() is None
    nearer = replace(SAFE, name="reposition", options={}, figures={"kl_answer": 0.001})
    assert replace(verdict, methods=(SAFE, nearer)).best() == nearer


def test_a_method_that_failed_is_warned_of(kb, open_kb, verdict, caplog):
    save_verdict(kb.store.layout.root, verdict)
    open_kb(method="epic", first_tokens=3)
    kb.ask("Where do dogs bark?", method="reposition")  # nobody checked it
    assert warnings_of(caplog) == []
    open_kb(method="concat")
    kb.ask("Where do dogs bark?", method="concat")
    assert [text for text in warnings_of(caplog) if "'concat' failed" in text and "below 0.95" in text] == warnings_of(
        caplog
    )
    assert len(warnings_of(caplog)) == 2


def strange_field(found):
    for verdict in found["verdicts"].values():
        verdict["strange"] = 1
    return json.dumps(found)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda found: "{", FILE),
        (lambda found: '{"version": 99, "verdicts": {}}', FILE),
        (lambda found: "[]", FILE),
        (strange_field, "check` again"),
    ],
)
def test_a_file_that_cannot_be_read_is_no_verdict(tmp_path, verdict, caplog, change, said):
    path = save_verdict(tmp_path, verdict)
    path.write_text(change(json.loads(path.read_text())))
    assert load_verdict(tmp_path, verdict.fingerprint) is None
    assert said in warnings_of(caplog)[0]
