"""The server over a store whose model runs in vLLM (a double)."""

import pytest
from serving import serving

import ragcache as rc
from integrations.remote.tests.vllm_double import VllmDouble
from integrations.remote.tests.vllm_double import serving as vllm_serving
from ragcache.server import tracing
from ragcache.server.settings import ServerSettings
from ragcache_demo.bag_of_words import BagOfWords
from ragcache_vllm.request_layout import served_name
from tests.server.conftest import _no_settings_from_outside, lm, made  # noqa: F401

SAID = "It meets on Monday."


@pytest.fixture
def vllm(lm):  # noqa: F811
    ids = lm.tokenizer(SAID, add_special_tokens=False)["input_ids"]
    with vllm_serving(VllmDouble(served_name(lm.fingerprint), ids)) as double:
        yield double


@pytest.fixture
def served(vllm, made):  # noqa: F811
    with (
        rc.RagCache.open(made, method="reposition", engine=vllm.url, embedder=BagOfWords()) as kb,
        serving(kb, ServerSettings(drain_s=5)) as served,
    ):
        yield served


def test_questions_are_answered_by_the_engine(served, vllm):
    answered = served.chat("When does the club meet?")
    assert answered.json()["choices"][0]["message"]["content"] == SAID
    assert len(vllm.bodies) == 1
    metrics = served.http.get("/metrics").text
    assert "ragcache_pass_tokens_total 0.0" in metrics
    assert 'ragcache_tokens_total{kind="completion"}' in metrics


def test_where_a_failing_engine_is_stays_here(served, vllm):
    vllm.answer = lambda request: request.whole(500, b"{}")
    failed = served.chat("When does the club meet?")
    assert failed.status_code == 502
    assert failed.json()["error"]["code"] == "engine_failed"
    assert "127.0.0.1" not in failed.text


def test_the_engines_spans_are_within_the_servers(served, vllm, exported, monkeypatch):
    served.chat("When does the club meet?")
    (whole,) = [span for span in exported.get_finished_spans() if span.name.startswith("chat ")]
    ids = f"00-{whole.context.trace_id:032x}-{whole.context.span_id:016x}"
    assert [trace[:52] for trace in vllm.traces] == [ids]
    monkeypatch.setattr(tracing, "tracer", lambda: None)
    served.chat("When does the club meet?")
    assert vllm.traces[1:] == [None]
