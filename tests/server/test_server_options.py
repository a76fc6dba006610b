"""A request may say whatever the engine's own options say."""

import dataclasses

import ragcache as rc
from ragcache.engine.options import AnswerDefaults
from ragcache.server.answers import engine_call
from ragcache.server.chat_types import ChatRequest, Extension

# Options that OpenAI's own fields stand for, and the client that hangs up.
ELSEWHERE = {"sampling", "cancelled"}
READ = {
    "method": "full",
    "method_options": {"reuse": False},
    "approximate": False,
    "evict": 7,
    "on_overflow": "trim",
    "order": "shared",
    "hint": False,
    "reasoning_effort": "low",
    "enable_thinking": True,
    "thinking_budget": 7,
    "chat_template_kwargs": {"a": 1},
}
RETRIEVE = {
    "search": "hybrid",
    "filter": {"letters": 3},
    "score_threshold": 0.25,
    "mmr_lambda": 0.5,
    "fetch_k": 9,
    "rerank": False,
}


def call(defaults: AnswerDefaults | None = None, **extension):
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Who?"}], "ragcache": extension}
    return engine_call(ChatRequest.model_validate(body), defaults or AnswerDefaults(), 4096).options


def test_no_option_of_the_engine_is_absent():
    known = {*rc.GenerationOptions.__annotations__, *rc.RetrieveOptions.__annotations__}
    assert known - ELSEWHERE <= set(Extension.model_fields)
    assert {*READ, "timeout_s"} == set(rc.GenerationOptions.__annotations__) - ELSEWHERE
    assert set(RETRIEVE) == set(rc.RetrieveOptions.__annotations__)
    assert {"k", "context", "drop_turns"} <= set(Extension.model_fields)


def test_every_option_reaches_the_engine():
    options = call(**READ, **RETRIEVE, k=3, context="keep")
    for name, value in {**READ, **RETRIEVE, "k": 3, "context": "keep"}.items():
        assert options[name] == value, name


def test_the_servers_defaults_reach_it_too_and_a_request_wins():
    fields = {field.name for field in dataclasses.fields(AnswerDefaults)}
    stated = {name: value for name, value in {**READ, **RETRIEVE}.items() if name in fields}
    assert {*READ, *RETRIEVE} - set(stated) == {"method", "method_options"}  # the store was opened with one
    defaults = AnswerDefaults(**stated)
    assert call(defaults).items() >= stated.items()
    assert (call()["drop_turns"], call(drop_turns=False)["drop_turns"]) == (True, False)
    off = AnswerDefaults(drop_turns=False)
    assert (call(off)["drop_turns"], call(off, drop_turns=True)["drop_turns"]) == (False, True)
    assert call(defaults, hint=True, evict=2).items() >= {"hint": True, "evict": 2, "order": "shared"}.items()


def test_the_engine_has_defaults_of_its_own():
    assert set(call(retrieve=False)) == {"sampling", "on_overflow", "order", "hint", "context", "drop_turns"}
