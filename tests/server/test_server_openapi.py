"""What /openapi.json says is so: requests made up from it get no 500 and nothing that is not documented."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import CHECKS, load_all_checks
from tiny_model import save_tiny_llama

import ragcache as rc
from ragcache.engine.options import AnswerDefaults
from ragcache.server.app import create_app
from ragcache.server.settings import ServerSettings
from ragcache_demo.bag_of_words import BagOfWords

load_all_checks()
# positive_data_acceptance does not hold and is not to: a well-formed request may name a model that is not there.
LEFT_OUT = [CHECKS.get_one("positive_data_acceptance")]
POSITIVE, NEGATIVE = schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE
# Only what takes a body or a query can be asked wrongly.
OPERATIONS = {
    ("post", "/v1/chat/completions"): (POSITIVE, NEGATIVE),
    ("post", "/v1/completions"): (POSITIVE, NEGATIVE),
    ("post", "/tokenize"): (POSITIVE, NEGATIVE),
    ("post", "/v1/responses"): (POSITIVE, NEGATIVE),
    ("get", "/v1/responses/{id}"): (POSITIVE,),
    ("delete", "/v1/responses/{id}"): (POSITIVE,),
    ("get", "/v1/responses/{id}/input_items"): (POSITIVE, NEGATIVE),
    ("post", "/v1/conversations"): (POSITIVE, NEGATIVE),
    ("get", "/v1/conversations"): (POSITIVE, NEGATIVE),
    ("get", "/v1/conversations/search"): (POSITIVE, NEGATIVE),
    ("get", "/v1/conversations/{id}"): (POSITIVE,),
    ("post", "/v1/conversations/{id}"): (POSITIVE, NEGATIVE),
    ("delete", "/v1/conversations/{id}"): (POSITIVE,),
    ("get", "/v1/conversations/{id}/export"): (POSITIVE,),
    ("post", "/v1/conversations/{id}/items"): (POSITIVE, NEGATIVE),
    ("get", "/v1/conversations/{id}/items"): (POSITIVE, NEGATIVE),
    ("get", "/v1/conversations/{id}/items/{item_id}"): (POSITIVE,),
    ("delete", "/v1/conversations/{id}/items/{item_id}"): (POSITIVE,),
    ("post", "/v1/files"): (POSITIVE, NEGATIVE),
    ("get", "/v1/files"): (POSITIVE, NEGATIVE),
    ("get", "/v1/files/{id}"): (POSITIVE,),
    ("get", "/v1/files/{id}/content"): (POSITIVE,),
    ("delete", "/v1/files/{id}"): (POSITIVE,),
    ("post", "/v1/vector_stores"): (POSITIVE, NEGATIVE),
    ("get", "/v1/vector_stores"): (POSITIVE, NEGATIVE),
    ("get", "/v1/vector_stores/{id}"): (POSITIVE,),
    ("post", "/v1/vector_stores/{id}"): (POSITIVE, NEGATIVE),
    ("delete", "/v1/vector_stores/{id}"): (POSITIVE,),
    ("post", "/v1/vector_stores/{id}/search"): (POSITIVE, NEGATIVE),
    ("post", "/v1/vector_stores/{id}/files"): (POSITIVE, NEGATIVE),
    ("get", "/v1/vector_stores/{id}/files"): (POSITIVE, NEGATIVE),
    ("get", "/v1/vector_stores/{id}/files/{file_id}"): (POSITIVE,),
    ("post", "/v1/vector_stores/{id}/files/{file_id}"): (POSITIVE, NEGATIVE),
    ("delete", "/v1/vector_stores/{id}/files/{file_id}"): (POSITIVE,),
    ("get", "/v1/vector_stores/{id}/files/{file_id}/content"): (POSITIVE,),
    ("post", "/v1/vector_stores/{id}/file_batches"): (POSITIVE, NEGATIVE),
    ("get", "/v1/vector_stores/{id}/file_batches/{batch_id}"): (POSITIVE,),
    ("post", "/v1/vector_stores/{id}/file_batches/{batch_id}/cancel"): (POSITIVE,),
    ("get", "/v1/vector_stores/{id}/file_batches/{batch_id}/files"): (POSITIVE, NEGATIVE),
    ("post", "/v1/search"): (POSITIVE, NEGATIVE),
    ("post", "/v1/rerank"): (POSITIVE, NEGATIVE),
    ("post", "/v1/embeddings"): (POSITIVE, NEGATIVE),
    ("get", "/v1/models"): (POSITIVE,),
    ("get", "/v1/models/{id}"): (POSITIVE,),
    ("get", "/v1/documents"): (POSITIVE, NEGATIVE),
    ("delete", "/v1/documents"): (POSITIVE, NEGATIVE),
    ("post", "/v1/documents"): (POSITIVE, NEGATIVE),
    ("get", "/v1/documents/{id}"): (POSITIVE,),
    ("delete", "/v1/documents/{id}"): (POSITIVE,),
    ("get", "/v1/store"): (POSITIVE,),
    ("get", "/v1/methods"): (POSITIVE,),
    ("post", "/api/chat"): (POSITIVE, NEGATIVE),
    ("post", "/api/generate"): (POSITIVE, NEGATIVE),
    ("post", "/api/embed"): (POSITIVE, NEGATIVE),
    ("post", "/api/embeddings"): (POSITIVE, NEGATIVE),
    ("post", "/api/show"): (POSITIVE, NEGATIVE),
    ("get", "/api/tags"): (POSITIVE,),
    ("get", "/api/ps"): (POSITIVE,),
    ("get", "/api/version"): (POSITIVE,),
    ("get", "/healthz"): (POSITIVE,),
    ("get", "/readyz"): (POSITIVE,),
    ("get", "/metrics"): (POSITIVE,),
}
CALM = {"deadline": None, "suppress_health_check": list(HealthCheck), "derandomize": True}


@pytest.fixture(scope="module")
def app(tmp_path_factory) -> Iterator[object]:
    """A short context keeps made-up requests short."""
    lm = rc.load_lm(save_tiny_llama(tmp_path_factory.mktemp("api") / "tiny", positions=128))
    with rc.RagCache.open(
        tmp_path_factory.mktemp("api") / "kb", model=lm, method="reposition", embedder=BagOfWords()
    ) as kb:
        kb.ingest([rc.Document("a/b", "Dogs bark."), rc.Document("c", "Cats sit.", {"year": 2024})])
        yield create_app(kb, ServerSettings(answers=AnswerDefaults(max_tokens=4, on_overflow="trim")))


@pytest.fixture(scope="module")
def api(app):
    return schemathesis.openapi.from_asgi("/openapi.json", app)


def named_right(case):
    """No model goes by a made-up name, and no answer comes within a made-up time (5e-324 s: 504)."""
    if isinstance(case.body, dict) and "model" in case.body:
        embeds = "/embed" in case.path
        case.body = {**case.body, "model": "bag-of-words" if embeds else "tiny"}
        if isinstance(told := case.body.get("ragcache"), dict):
            case.body["ragcache"] = {name: value for name, value in told.items() if name != "timeout_s"}
    return case


def check(api, method: str, path: str, examples: int) -> None:
    for mode in OPERATIONS[method, path]:
        cases = api[path][method].as_strategy(generation_mode=mode)

        @settings(max_examples=examples, **CALM)
        @given(cases.map(named_right) if mode is POSITIVE else cases)
        def answers_are_as_documented(case):
            case.call_and_validate(excluded_checks=LEFT_OUT)

        answers_are_as_documented()


def test_the_routes_are_these(api):
    assert ({(one.ok().method, one.ok().path) for one in api.get_all_operations()}) == set(OPERATIONS)


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_answers_are_as_documented(api, method, path):
    check(api, method, path, 6)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_many_answers_are_as_documented(api, method, path):
    check(api, method, path, 500)
