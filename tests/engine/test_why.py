"""Why passages are not read from KV, each made to happen."""

from dataclasses import replace

from engine_texts import TEXTS

import ragcache as rc

QUESTION = "Where does the river rise?"
TEXT = " ".join(f"The cat number {number} sits on mat {number * 7}." for number in range(8))


def test_stored_passages_are_found_evicted_or_never_stored(open_kb):
    with open_kb(texts={"rivers": TEXTS["rivers"]}) as kb:
        chunks = kb.chunks()
        assert {one.why for one in kb.why(QUESTION, k=1)} == {"found"}
        kb.store.kv.delete(chunks[0].handle)
        assert kb.why(QUESTION, hits=[rc.Passage(id=chunks[0].id)])[0].why == "evicted"
        kb.ingest(rc.Document("lazy", TEXT), kv="lazy")
        lazy = next(chunk for chunk in kb.chunks() if chunk.document_id == "lazy")
        assert kb.why(QUESTION, hits=[rc.Passage(id=lazy.id)])[0].why == "never stored"
        assert not kb.store.kv.lookup([chunks[0].handle]), "nothing is computed"
    with open_kb(recipe="prefix") as kb:
        assert kb.why(QUESTION, hits=[rc.Passage(id=lazy.id)])[0].why == "never stored"
        rest = kb.why(QUESTION, hits=[rc.Passage(id=chunks[-1].id)])
        assert rest[0].why == "another model"


def test_passages_of_no_document_have_reasons_too(open_kb):
    with open_kb() as kb:
        (handle,) = kb.precompute(TEXT).handles
        asked = {"hits": [rc.Passage(TEXT)]}
        assert [(one.why, one.place) for one in kb.why(QUESTION, **asked)] == [("found", -1)]
        kb.store.kv.foreign.delete(handle)
        assert kb.why(QUESTION, **asked)[0].why == "evicted"
        assert kb.why(QUESTION, hits=[rc.Passage(TEXTS["rivers"])])[0].why == "never stored"
    with open_kb(recipe="prefix") as kb:
        assert kb.why(QUESTION, **asked)[0].why == "another model"


def test_the_token_that_differs_is_named(open_kb):
    with open_kb() as kb:
        kb.precompute(TEXT)
        altered = TEXT.replace("number 5 sits", "number 5 stands")
        (one,) = kb.why([{"role": "user", "content": f"{altered}\n\nWho sits?"}])
        ids, other = (kb.lm.tokenizer(text, add_special_tokens=False)["input_ids"] for text in (TEXT, altered))
        assert one.why == "differs"
        assert one.place == next(at for at, (a, b) in enumerate(zip(ids, other, strict=False)) if a != b)
        assert "stands" not in one.detail.partition("in the prompt")[0]
        assert kb.why([{"role": "user", "content": "Nothing of the kind is said here, or anywhere."}]) == []


SHORT = rc.Sampling(max_tokens=2)


def test_an_answer_explains_what_was_true_before_it(open_kb):
    """`why`, asked before each question, is what its answer says after it, but for the tier."""

    def told(one):
        return replace(one, detail="") if one.why == "found" else one

    with open_kb() as kb:
        kb.ingest(rc.Document("rivers", TEXTS["rivers"]))
        kb.ingest(rc.Document("lazy", TEXT), kv="lazy")
        kb.precompute(TEXTS["dogs"])
        first, altered = kb.chunks_of("rivers")[0], TEXTS["dogs"].replace(" the ", " these ", 1)
        asked = [
            {"k": 2},
            {"hits": [rc.Passage(id=next(chunk.id for chunk in kb.chunks() if chunk.document_id == "lazy"))]},
            {"hits": [rc.Passage(TEXTS["clubs"])]},
            {"hits": [rc.Passage(TEXTS["dogs"])]},
            {"hits": [rc.Passage(altered)]},
            {"k": 2, "method": "full"},
        ]
        found = []
        for options in [*asked, "evict", asked[2]]:
            if options == "evict":
                kb.store.kv.delete(first.handle)
                options = {"hits": [rc.Passage(id=first.id)]}
            before = kb.why(QUESTION, **options)
            answer = kb.ask(QUESTION, sampling=SHORT, **options)
            assert [told(one) for one in answer.explain()] == [told(one) for one in before]
            found += [one.why for one in before]
        assert set(found) == {"found", "never stored", "differs", "method cannot", "evicted"}
        assert "reasons" not in answer.to_json()
    assert rc.Answer("", [], answer.timings, answer.usage, "full").explain() == []


def test_a_collection_is_not_told_of_anothers_text(open_kb):
    with open_kb() as kb:
        a, b = kb.collection("a"), kb.collection("b")
        a.precompute(TEXT)
        asked = {"hits": [rc.Passage(TEXT)]}
        assert [one.why for one in b.why(QUESTION, **asked)] == ["never stored"]
        assert [one.why for one in b.ask(QUESTION, sampling=SHORT, **asked).explain()] == ["never stored"]
        assert [one.why for one in a.why(QUESTION, **asked)] == ["found"]
