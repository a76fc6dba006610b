"""Several vLLM servers over one store: which one a question goes to, and what happens where one is gone."""

import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import httpx
import pytest

import ragcache as rc
from integrations.remote.tests import vllm_double
from integrations.remote.tests.vllm_double import VllmDouble, serving
from ragcache.errors import ConfigError, ContextTooLongError, EngineError
from ragcache.models.deadline import NO_LIMIT
from ragcache_vllm import client
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


@contextmanager
def servers(count: int) -> Iterator[tuple[VllmClient, list[VllmDouble]]]:
    """Servers in the order in which key "" ranks them, and their client."""
    with ExitStack() as stack:
        doubles = [stack.enter_context(serving(VllmDouble("tiny", [5, 6]))) for _ in range(count)]
        engine = VllmClient(",".join(double.url for double in doubles), "tiny")
        stack.callback(engine.close)
        by_url = {double.url: double for double in doubles}
        yield engine, [by_url[server.url] for server in engine.ranked("")]


def ask(engine: VllmClient, key: str = "") -> list[int]:
    return [id for id, _ in engine.complete({"prompt": [1]}, NO_LIMIT, key).tokens()]


def hang_up(request):
    request.close_connection = True


def dies_at_work(request):
    request.begin()
    request.wfile.write(b'data: {"error": {"message": "EngineCore encountered an issue", "code": 500}}\n\n')


FAILURES = {
    "it hangs up": hang_up,
    "it begins an answer and hangs up": lambda request: request.begin(),
    "its engine is dead": lambda request: request.whole(500, b"{}"),
    "its engine dies": dies_at_work,
}


@pytest.mark.parametrize("failure", FAILURES)
def test_a_server_that_fails_before_the_first_token_costs_no_answer(failure):
    with servers(2) as (engine, (first, second)):
        first.answer = FAILURES[failure]
        assert ask(engine) == [5, 6]
        assert len(second.bodies) == 1


def test_an_answer_that_has_begun_is_not_begun_again():
    def breaks(request):
        request.begin()
        request.event(next(first.events()))

    with servers(2) as (engine, (first, second)):
        first.answer = breaks
        with pytest.raises(EngineError, match="broke off"):
            ask(engine)
        assert not second.bodies


def test_a_request_that_ends_two_servers_goes_to_no_third():
    with servers(3) as (engine, doubles):
        for double in doubles:
            double.answer = hang_up
        with pytest.raises(EngineError, match="broke off"):
            ask(engine)
        assert [len(double.bodies) for double in doubles] == [1, 1, 0]


@pytest.mark.parametrize("status", [400, 429])
def test_a_refused_request_goes_to_no_other_server(status):
    with servers(2) as (engine, (first, second)):
        first.answer = lambda request: request.whole(status, b"{}")
        with pytest.raises(EngineError, match=f"answered {status}"):
            ask(engine)
        assert not second.bodies


def test_a_server_that_was_not_reached_is_asked_last_for_a_while(monkeypatch):
    with serving(VllmDouble("tiny", [5, 6])) as double:
        engine = VllmClient(f"{GONE},{double.url}", "tiny")
        key = next(key for key in map(str, range(100)) if engine.ranked(key)[0].url == GONE)
        assert ask(engine, key) == [5, 6]
        assert [server.url for server in engine.ranked(key)] == [double.url, GONE]
        monkeypatch.setattr(client, "ASKED_LAST_S", 0.0)
        assert engine.ranked(key)[0].url == GONE
        engine.close()


def test_a_server_too_busy_to_be_reached_in_time_is_tried_again_after_the_others():
    tried: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        tried.append(request.url.host)
        if request.url.host == "dead":
            raise httpx.ConnectError("refused")
        if tried.count("busy") < 2:
            raise httpx.ConnectTimeout("")
        return httpx.Response(200, text='data: {"choices": [{"token_ids": [5]}]}\n\ndata: [DONE]\n\n')

    engine = VllmClient("vllm://busy:1,vllm://dead:1", "tiny")
    engine._client = httpx.AsyncClient(transport=httpx.MockTransport(answer))
    assert ask(engine) == [5]
    assert sorted(tried) == ["busy", "busy", "dead"]
    engine.close()


@contextmanager
def double_process() -> Iterator[tuple[str, subprocess.Popen[str]]]:
    command = [sys.executable, vllm_double.__file__]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process.stdout.readline().strip(), process
        finally:
            process.kill()


def test_a_server_killed_while_eight_ask_costs_the_answers_in_flight_alone():
    with double_process() as (one, killed), double_process() as (other, _):
        engine = VllmClient(f"{one},{other}", "tiny")
        keys = [str(number) for number in range(48)]
        theirs = {key: engine.ranked(key)[0].url for key in keys}
        asked: dict[str, tuple[float, float]] = {}

        def answer(key: str) -> list[int] | EngineError:
            begun = time.monotonic()
            try:
                return ask(engine, key)
            except EngineError as error:
                return error
            finally:
                asked[key] = (begun, time.monotonic())

        with ThreadPoolExecutor(8) as askers:
            answers = askers.map(answer, keys)
            time.sleep(0.5)
            killed_at = time.monotonic()
            killed.kill()
            found = dict(zip(keys, answers, strict=True))
        lost = [key for key in keys if found[key] != [5, 6, 7, 8]]
        assert 0 < len(lost) <= 8, "an answer that had begun is lost"
        for key in lost:
            assert isinstance(found[key], EngineError), found[key]
            assert theirs[key] == one
            assert asked[key][0] < killed_at < asked[key][1]
        assert any(theirs[key] == one and asked[key][0] > killed_at for key in keys)
        engine.close()


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
