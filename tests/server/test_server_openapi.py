"""What /openapi.json says is so: requests made up from it get no 500 and nothing that is not documented."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import schemathesis
from hypothesis import HealthCheck, given, reject, settings
from hypothesis.strategies import composite
from schemathesis.checks import CHECKS, load_all_checks
from schemathesis.core.errors import InvalidSchema
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
# What each route takes and answers, as tests/test_wire.py holds it.
ROUTES = json.loads((Path(__file__).parents[1] / "wire.json").read_text(encoding="utf-8"))["http"]
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


@composite
def that_can_be_made(draw, cases):
    """schemathesis breaks a schema to make a wrong request, now and then so that it can make none."""
    try:
        return draw(cases)
    except InvalidSchema:
        reject()


@pytest.mark.parametrize("examples", [3, pytest.param(500, marks=pytest.mark.slow)])
@pytest.mark.parametrize("route", ROUTES)
def test_answers_are_as_documented(api, route, examples):
    """Only what takes a body or a query can be asked wrongly."""
    method, path = route.split()
    for mode in (POSITIVE, NEGATIVE) if re.search(r"query|application/|multipart/", ROUTES[route]) else (POSITIVE,):
        cases = that_can_be_made(api[path][method.lower()].as_strategy(generation_mode=mode))

        @settings(max_examples=examples, **CALM)
        @given(cases.map(named_right) if mode is POSITIVE else cases)
        def answers_are_as_documented(case):
            case.call_and_validate(excluded_checks=LEFT_OUT, timeout=120)

        answers_are_as_documented()
