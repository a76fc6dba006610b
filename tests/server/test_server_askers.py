"""Many askers of one server: memory, a time for each question, and what the figures say of passes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from prometheus_client.parser import text_string_to_metric_families
from serving import serving, wait_for

import ragcache as rc
from ragcache_demo.bag_of_words import BagOfWords

QUESTION = "Where does the cat sit?"


def figures(served) -> dict[tuple[str, ...], float]:
    families = text_string_to_metric_families(served.http.get("/metrics").text)
    return {(s.name, *s.labels.values()): s.value for family in families for s in family.samples}


def test_a_questions_own_time(served):
    late = served.chat(QUESTION, max_tokens=4000, ragcache={"timeout_s": 1e-6})
    assert late.status_code == 504
    assert late.json()["error"]["code"] == "request_timeout"
    assert served.chat(QUESTION, max_tokens=2, ragcache={"timeout_s": 60}).status_code == 200
    bad = served.chat(QUESTION, ragcache={"timeout_s": 0})
    assert (bad.status_code, bad.json()["error"]["param"]) == (400, "ragcache.timeout_s")


def test_an_answer_that_can_never_fit(kb, lm):
    kb.close()
    with (
        rc.RagCache.open(
            kb.store.layout.root,
            model=lm,
            method="reposition",
            embedder=BagOfWords(),
            store=rc.StoreConfig(answer_bytes=100),
        ) as small,
        serving(small) as served,
    ):
        refused = served.chat(QUESTION, max_tokens=4)
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert (error["code"], error["param"]) == ("answer_too_large", "max_tokens")
    assert "all answers together may take 100" in error["message"]


@pytest.mark.parametrize("slots", [4])
def test_passes_and_memory_are_shown(serve, kb, slots):
    served = serve(slots=slots)
    before = kb.lm.scheduler.stats()
    expected = served.chat(QUESTION, max_tokens=8).json()["choices"][0]["message"]["content"]
    with ThreadPoolExecutor(slots) as pool:
        answers = list(pool.map(lambda _: served.chat(QUESTION, max_tokens=8).json(), range(8)))
    assert {answer["choices"][0]["message"]["content"] for answer in answers} == {expected}
    wait_for(lambda: kb.admission.reserved_bytes == 0)
    found, stats = figures(served), kb.lm.scheduler.stats()
    assert found["ragcache_pass_members_count",] == stats.passes > before.passes
    assert found["ragcache_pass_members_sum",] == sum(size * count for size, count in stats.members.items())
    assert found["ragcache_pass_members_bucket", "+Inf"] == stats.passes
    assert found["ragcache_pass_members_bucket", "1"] == stats.members[1]
    assert found["ragcache_pass_tokens_total",] == stats.tokens
    assert found["ragcache_answer_bytes",] == found["ragcache_answers_waiting",] == 0
