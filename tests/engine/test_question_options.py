"""Options of questions: each is taken by every call that it concerns, and one that there is not is refused by name."""

import inspect

import pytest
from plain_oracle import greedy

import ragcache as rc
from ragcache.errors import ConfigError
from ragcache.prompt import Prompt, prompt_format

QUESTION = "Where do dogs bark?"
TURNS = [{"role": "user", "content": QUESTION}]
CALLS = {
    "retrieve": lambda kb, **options: kb.retrieve(QUESTION, **options),
    "ask": lambda kb, **options: kb.ask(QUESTION, **options),
    "stream": lambda kb, **options: kb.stream(QUESTION, **options),
    "chat": lambda kb, **options: kb.chat(TURNS, **options),
    "stream_chat": lambda kb, **options: kb.stream_chat(TURNS, **options),
    "complete": lambda kb, **options: kb.complete(QUESTION, **options),
    "stream_completion": lambda kb, **options: kb.stream_completion(QUESTION, **options),
}


@pytest.mark.parametrize("call", CALLS)
def test_calls_for_an_event_loop_say_what_they_take_as_the_others_do(call):
    own, twin = (inspect.signature(getattr(rc.RagCache, name)) for name in (call, f"a{call}"))
    assert list(own.parameters.values()) == list(twin.parameters.values())
    assert str(own.parameters["options"].annotation).startswith("Unpack[")


def test_a_question_chooses_among_as_many_candidates_as_it_says(kb):
    for options in ({"fetch_k": 4}, {"fetch_k": 2}):
        wanted = [hit.chunk.id for hit in kb.retrieve(QUESTION, 2, mmr_lambda=0.01, **options)]
        answer = kb.ask(QUESTION, 2, mmr_lambda=0.01, sampling=rc.Sampling(1), **options)
        assert [hit.chunk.id for hit in answer.hits] == wanted
    with pytest.raises(ConfigError, match="fetch_k"):
        kb.chat(TURNS, k=2, mmr_lambda=0.5, fetch_k=1)


# approximate


READ = [call for call in CALLS if call != "retrieve"]
EXACT = {"approximate": False, "sampling": rc.Sampling(max_tokens=6)}


def last_answer(found) -> rc.Answer:
    return found if isinstance(found, rc.Answer) else list(found)[-1].answer


def test_without_approximation_answers_are_those_of_a_model_alone(kb, oracle):
    """Passages are read, and a prompt's beginning is reused still: the second time all but its end is known."""
    assert kb.method == "reposition"
    first, again = (kb.ask(QUESTION, 3, **EXACT) for _ in range(2))
    text = prompt_format(kb.lm.tokenizer)
    chunks = [hit.chunk.token_ids for hit in first.hits]
    prompt = Prompt(text.prefix_ids, chunks, text.suffix_ids(kb.lm.tokenizer, QUESTION))
    assert first.text == again.text == greedy(*oracle, prompt, None, 6)
    assert (first.method, first.method_reason) == ("full", "asked for: approximate=False")
    assert {hit.kv for hit in first.hits} == {"unused"}
    assert first.usage.computed_tokens > 100 > 2 >= again.usage.computed_tokens


LOSSY = ({"method": "reposition"}, {"method": "epic", "method_options": {"first_tokens": 3}}, {"evict": 9})


def test_every_call_takes_it_and_refuses_what_contradicts_it(kb):
    for call in READ:
        more = {"k": 2} if "chat" in call or call in ("ask", "stream") else {}
        assert last_answer(CALLS[call](kb, **more, **EXACT)).method == "full", call
        assert last_answer(CALLS[call](kb, **more, **EXACT, method="auto")).method == "full", call
        for lossy in LOSSY:
            with pytest.raises(ConfigError, match=r"is approximate, and approximate=False wants exact") as refused:
                last_answer(CALLS[call](kb, **more, **EXACT, **lossy))
            assert refused.value.option == "approximate"
        with pytest.raises(ConfigError, match="approximate is 'no'"):
            last_answer(CALLS[call](kb, approximate="no"))


def test_a_store_may_be_opened_so_and_a_question_say_otherwise(kb, open_kb):
    wanted = kb.ask(QUESTION, 3, **EXACT).text
    kb.close()
    exact = open_kb(method=None, store=rc.StoreConfig(approximate=False))
    assert (exact.method, exact.reads_blocks) == ("full", False)
    answer = exact.ask(QUESTION, 3, sampling=EXACT["sampling"])
    assert (answer.text, answer.method) == (wanted, "full")
    with pytest.raises(ConfigError, match="ask with approximate=True"):
        exact.ask(QUESTION, 3, method="reposition")
    loose = exact.ask(QUESTION, 3, method="reposition", approximate=True)
    assert (loose.method, {hit.kv for hit in loose.hits}) == ("reposition", {"disk"})


@pytest.mark.parametrize("lossy", [{"method": "reposition"}, {"method": None, "evict": 9}])
def test_a_store_that_contradicts_itself_is_not_made(open_kb, tmp_path, lossy):
    with pytest.raises(ConfigError, match="is approximate"):
        open_kb(tmp_path / "new", **lossy, store=rc.StoreConfig(approximate=False))
    assert not (tmp_path / "new").exists()
