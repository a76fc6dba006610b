"""`RagCache.open(engine=...)` over vLLM against the embedded engine, over the example corpus."""

from pathlib import Path
from typing import Any

import pytest

import ragcache as rc
from ragcache_demo.bag_of_words import BagOfWords

pytest.importorskip("vllm", reason="runs in vLLM's own environment")

from served import EXAMPLES, QUESTIONS, serving

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]
METHODS = {"link": {}, "reposition": {}, "epic": {"first_tokens": 4}, "full": {}}
FORMS: dict[str, dict[str, Any]] = {
    "json": {
        "json_schema": {
            "type": "object",
            "properties": {"day": {"enum": ["Monday", "Friday"]}, "number": {"type": "integer", "maximum": 9}},
            "required": ["day", "number"],
            "additionalProperties": False,
        }
    },
    "expression": {"regex": "[A-Z][a-z]{2,5}"},
    "choices": {"choices": ["yes", "no"]},
}
EMBEDDER = BagOfWords()
SOME, FEW = slice(None, None, 8), slice(None, None, 20)


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("front") / "kb"
    with rc.RagCache.open(root, model="mini", embedder=EMBEDDER) as kb:
        report = kb.ingest([EXAMPLES / "corpus"])
        assert not report.failed
    return root


@pytest.fixture(scope="module")
def engine(store, tmp_path_factory):
    with serving(store, tmp_path_factory.mktemp("log") / "vllm.txt") as url:
        yield url


@pytest.mark.parametrize("method", METHODS)
def test_every_question_gets_the_embedded_engines_answer(store, engine, method):
    options = METHODS[method]
    with (
        rc.RagCache.open(store, method=method, embedder=EMBEDDER, **options) as here,
        rc.RagCache.open(store, method=method, engine=engine, embedder=EMBEDDER, **options) as front,
    ):
        for question in QUESTIONS[SOME if method in ("link", "reposition") else FEW]:
            expected, answer = here.ask(question, k=4), front.ask(question, k=4)
            assert answer.text == expected.text, question
            assert [source.chunk.id for source in answer.hits] == [source.chunk.id for source in expected.hits]
            assert answer.usage.prompt_tokens == expected.usage.prompt_tokens
            assert answer.usage.completion_tokens == expected.usage.completion_tokens
            assert answer.finish_reason == expected.finish_reason
            assert method == "full" or answer.usage.cached_tokens > answer.usage.prompt_tokens / 2


def test_passages_read_in_company_are_loaded(tmp_path):
    """Also behind a filter, which hides neighbours: of the passages whose neighbours it hides there are no blocks."""
    with rc.RagCache.open(tmp_path / "kb", model="mini-base", embedder=EMBEDDER) as kb:
        assert not kb.ingest([EXAMPLES / "corpus"]).failed
        assert kb.info().neighbours == 2
    asked = {"k": 4, "sampling": rc.Sampling(max_tokens=8)}
    with (
        serving(tmp_path / "kb", tmp_path / "vllm.txt") as url,
        rc.RagCache.open(tmp_path / "kb", embedder=EMBEDDER, method="reposition") as here,
        rc.RagCache.open(tmp_path / "kb", embedder=EMBEDDER, method="reposition", engine=url) as front,
    ):
        expected, answer = (kb.ask(QUESTIONS[0], **asked) for kb in (here, front))
        assert answer.text == expected.text
        assert answer.usage.cached_tokens == expected.usage.cached_tokens > answer.usage.prompt_tokens / 2
        own = {"source": expected.hits[0].chunk.source}
        hidden = front.ask(QUESTIONS[0], filter=own, **asked)
        assert {source.kv for source in hidden.hits} == {"computed"}
        assert hidden.usage.cached_tokens == 0


def test_a_long_system_prompt_comes_from_a_block_too(store, engine):
    system = "You answer visitors of the archive, briefly and from the passages alone. " * 8
    options = {"method": "reposition", "embedder": EMBEDDER, "system": system}
    with rc.RagCache.open(store, **options) as here:
        here.ingest(rc.Document("archive", "The archive opens at nine."))
        expected = here.ask(QUESTIONS[0], k=3)
        suffix = here._engine.prompts.question_ends(QUESTIONS[0]).suffix_ids
    with rc.RagCache.open(store, engine=engine, **options) as front:
        answer = front.ask(QUESTIONS[0], k=3)
    assert answer.text == expected.text
    assert answer.usage.computed_tokens == len(suffix)


@pytest.mark.parametrize("form", FORMS)
def test_an_answer_of_a_given_form_is_the_embedded_engines(store, engine, form):
    asked = {"k": 3, "sampling": rc.Sampling(max_tokens=40, **FORMS[form])}
    with (
        rc.RagCache.open(store, embedder=EMBEDDER) as here,
        rc.RagCache.open(store, engine=engine, embedder=EMBEDDER) as front,
    ):
        expected, answer = here.ask(QUESTIONS[0], **asked), front.ask(QUESTIONS[0], **asked)
    assert (answer.text, answer.finish_reason) == (expected.text, expected.finish_reason)
