"""Answers that the server keeps, by the official client: previous_response_id."""

import pytest
from openai import BadRequestError, NotFoundError
from openai_clients import client_of

import ragcache as rc

QUESTION = "Where does the cat sit?"
SHORT = rc.Sampling(6)


def ask(client, input=QUESTION, **more):
    return client.responses.create(model="tiny", input=input, max_output_tokens=6, **more)


def turns(*texts):
    roles = ("user", "assistant")
    return [{"role": roles[rank % 2], "content": text} for rank, text in enumerate(texts)]


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_goes_on_from_an_earlier_one(client, kb, stream):
    first = ask(client, instructions="Be short.")
    second = ask(client, "And who barks?", previous_response_id=first.id)
    third = ask(client, "Why?", previous_response_id=second.id, stream=stream)
    if stream:
        third = list(third)[-1].response
    assert (third.previous_response_id, third.store) == (second.id, True)
    # Instructions are those of one answer, as in OpenAI's API.
    told = turns(QUESTION, first.output_text, "And who barks?", second.output_text, "Why?")
    assert third.output_text == kb.chat(told, k=5, sampling=SHORT).text
    assert client.responses.retrieve(third.id).output == third.output


def test_answers_that_are_not_kept(client, serve, kb):
    unkept = ask(client, store=False)
    assert unkept.store is False
    kept = ask(client)
    later = ask(client, "Why?", previous_response_id=kept.id)
    assert client.responses.delete(kept.id) is None
    for id in (unkept.id, kept.id):
        with pytest.raises(NotFoundError, match="there is no response"):
            client.responses.retrieve(id)
        with pytest.raises(BadRequestError) as gone:
            ask(client, "Why?", previous_response_id=id)
        assert (gone.value.param, gone.value.code) == ("previous_response_id", "previous_response_not_found")
    with pytest.raises(BadRequestError, match=kept.id):  # an answer in the middle is gone
        ask(client, "And?", previous_response_id=later.id)


def test_the_newest_answers_are_kept(serve):
    with client_of(serve(keep_responses=2)) as client:
        ids = [ask(client, str(rank)).id for rank in range(3)]
        assert [client.responses.retrieve(id).id for id in ids[1:]] == ids[1:]
        with pytest.raises(NotFoundError):
            client.responses.retrieve(ids[0])
    with client_of(serve(keep_responses=0)) as client:
        assert ask(client).store is False


def test_a_chain_that_is_too_long_takes_no_more(client, monkeypatch):
    first = ask(client)
    monkeypatch.setattr("ragcache_openai.items.MOST_LETTERS", len(QUESTION) - 1)
    with pytest.raises(BadRequestError, match="begin another one") as full:
        ask(client, "Why?", previous_response_id=first.id)
    assert full.value.code == "conversation_too_long"


def test_what_is_another_keys_is_not_there(serve):
    served = serve(api_keys=("first", "second"))
    with client_of(served, "first") as first, client_of(served, "second") as second:
        answer = ask(first)
        for call in (second.responses.retrieve, second.responses.delete):
            with pytest.raises(NotFoundError):
                call(answer.id)
        with pytest.raises(BadRequestError, match="there is no previous response"):
            ask(second, previous_response_id=answer.id)
        assert first.responses.retrieve(answer.id).id == answer.id
