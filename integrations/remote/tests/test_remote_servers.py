"""Several vLLM servers over one store: which one a question goes to, and what happens where one is gone."""

from collections import Counter

import pytest

import ragcache as rc
from integrations.remote.tests.vllm_double import VllmDouble, serving
from ragcache.errors import ConfigError, ContextTooLongError, EngineError
from ragcache.models.deadline import NO_LIMIT
from ragcache_vllm.client import VllmClient
from ragcache_vllm.request_layout import served_name

QUESTION = "When does the rowing club of Kelbrook meet?"
SAID = "It meets on Monday. Then they row."
GONE = "vllm://127.0.0.1:9"


@pytest.fixture
def pair(kb):
    ids = kb.lm.tokenizer(SAID, add_special_tokens=False)["input_ids"]
    name = served_name(kb.lm.fingerprint)
    with serving(VllmDouble(name, ids)) as one, serving(VllmDouble(name, ids)) as other:
        yield one, other


@pytest.fixture
def front(open_kb, pair):
    """Opens the store with its model on both servers, or those that are named."""
    return lambda *urls: open_kb(model=None, engine=",".join(urls or [one.url for one in pair]))


def test_one_that_goes_moves_its_own_keys_alone():
    keys = [f"key {number}" for number in range(600)]
    three = VllmClient("vllm://a:1,vllm://b:1,vllm://c:1", "m")
    two = VllmClient("vllm://a:1,vllm://c:1", "m")
    before = {key: three.ranked(key)[0].url for key in keys}
    assert min(Counter(before.values()).values()) > 150
    moved = {key for key in keys if two.ranked(key)[0].url != before[key]}
    assert moved == {key for key in keys if before[key] == "vllm://b:1"}


def test_questions_over_one_best_passage_go_to_one_server(front, pair):
    kb = front()
    answers = [kb.ask(QUESTION + words, k=2) for words in ("", " please", " now", " then")]
    assert len({answer.hits[0].handle for answer in answers}) == 1
    asked = sorted(len(one.bodies) for one in pair)
    assert asked == [0, 4]


def test_another_server_answers_where_one_is_gone(front, pair):
    one = pair[0]
    assert front(one.url, GONE).ask(QUESTION, k=2).text == SAID
    engine = VllmClient(f"{GONE},{one.url}", one.name)
    key = next(key for key in map(str, range(100)) if engine.ranked(key)[0].url == GONE)
    assert [id for id, _ in engine.complete({"prompt": [1]}, NO_LIMIT, key).tokens()] == one.ids
    engine.close()


def test_all_of_them_gone(front):
    with pytest.raises(EngineError, match=r"nothing answers at vllm://127.0.0.1:9"):
        front(GONE, "vllm://127.0.0.1:19")


def test_prompts_fit_the_smallest(front, pair):
    pair[1].longest = 40
    with pytest.raises(ContextTooLongError):
        front().ask(QUESTION, k=3)


def test_each_address_is_checked():
    with pytest.raises(ConfigError, match=r"engine '' is no address of an engine; give vllm://host:port, or several"):
        VllmClient("vllm://a:1,", "m")


def test_log_probabilities_are_the_servers(front, pair):
    """Log-probabilities in the form that vLLM sends, with ids for texts: the chosen token is among the likeliest."""
    one = pair[0]

    def answer(request):
        request.begin()
        for id in one.ids:
            near = {f"token_id:{id}": -2.5, "token_id:7": -0.5, "token_id:8": -1.0}
            said = {"token_logprobs": [-2.5], "top_logprobs": [near], "tokens": [f"token_id:{id}"]}
            request.event({"choices": [{"index": 0, "text": "?", "token_ids": [id], "logprobs": said}]})
        request.wfile.write(b"data: [DONE]\n\n")

    one.answer = answer
    found = front(one.url).ask(QUESTION, sampling=rc.Sampling(logprobs=2)).logprobs
    assert (one.bodies[0]["logprobs"], one.bodies[0]["return_tokens_as_token_ids"]) == (2, True)
    assert [token.id for token in found] == one.ids
    assert "".join(token.text for token in found) == SAID
    assert {token.logprob for token in found} == {-2.5}
    assert {tuple((near.id, near.logprob) for near in token.top) for token in found} == {((7, -0.5), (8, -1.0))}
