"""Answers and conversations that the server keeps, by the official client: previous_response_id, /v1/conversations."""

import shutil

import pytest
from openai import BadRequestError, NotFoundError
from openai_clients import client_of
from serving import serving

import ragcache as rc
from ragcache.server.settings import ServerSettings
from ragcache_demo.bag_of_words import BagOfWords
from ragcache_openai.items import MOST_LETTERS

QUESTION = "Where does the cat sit?"
SHORT = rc.Sampling(6)


def ask(client, input=QUESTION, **more):
    return client.responses.create(model="tiny", input=input, max_output_tokens=6, **more)


def turns(*texts):
    roles = ("user", "assistant")
    return [{"role": roles[rank % 2], "content": text} for rank, text in enumerate(texts)]


def texts_of(items):
    return [item.content[0].text for item in items]


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
    [asked] = client.responses.input_items.list(third.id)
    assert (asked.role, asked.content[0].text) == ("user", "Why?")


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


def test_no_answer_is_kept(serve):
    with client_of(serve(keep_responses=0)) as client:
        assert ask(client).store is False


def test_a_conversation_grows_with_its_answers(client, kb):
    system = {"type": "message", "role": "system", "content": "Be short."}
    conversation = client.conversations.create(items=[system], metadata={"topic": "cats"})
    first = ask(client, conversation=conversation.id)
    second = ask(client, "And who barks?", conversation={"id": conversation.id})
    assert second.conversation.id == conversation.id
    told = [{"role": "system", "content": "Be short."}, *turns(QUESTION, first.output_text, "And who barks?")]
    assert second.output_text == kb.chat(told, k=5, sampling=SHORT).text
    items = list(client.conversations.items.list(conversation.id, order="asc", limit=2))
    assert texts_of(items) == ["Be short.", QUESTION, first.output_text, "And who barks?", second.output_text]
    assert [item.role for item in items] == ["system", "user", "assistant", "user", "assistant"]
    newest = client.conversations.items.list(conversation.id, limit=1).data
    assert newest == [items[-1]] == [client.conversations.items.retrieve(items[-1].id, conversation_id=conversation.id)]
    with pytest.raises(BadRequestError, match=f"conversation='{conversation.id}'"):
        ask(client, previous_response_id=second.id)


def test_conversations_are_changed_and_deleted(client):
    conversation = client.conversations.create(items=turns("Who?", "Jonas."))
    assert client.conversations.retrieve(conversation.id) == conversation
    changed = client.conversations.update(conversation.id, metadata={"topic": "people"})
    assert (changed.metadata, changed.created_at) == ({"topic": "people"}, conversation.created_at)
    [added] = client.conversations.items.create(conversation.id, items=turns("When?")).data
    assert client.conversations.items.delete(added.id, conversation_id=conversation.id).id == conversation.id
    assert texts_of(client.conversations.items.list(conversation.id)) == ["Jonas.", "Who?"]
    assert client.conversations.delete(conversation.id).deleted
    for call in (
        lambda: client.conversations.retrieve(conversation.id),
        lambda: client.conversations.items.list(conversation.id),
        lambda: ask(client, conversation=conversation.id),
    ):
        with pytest.raises(NotFoundError, match="there is no conversation"):
            call()


def test_conversations_are_listed_searched_and_exported(client, served):
    cats = client.conversations.create(items=turns("Where does the CAT sleep?", "On the mat."), metadata={"a": "b"})
    dogs = client.conversations.create(items=turns("日本語の文章 about a cat", "100% sure"))
    listed = served.http.get("/v1/conversations").json()
    assert [one["id"] for one in listed["data"]] == [dogs.id, cats.id]

    def found(query, **more):
        answer = served.http.get("/v1/conversations/search", params={"query": query, **more}).json()
        return [(one["conversation_id"], one["content"][0]["text"]) for one in answer["data"]]

    assert found("sleep cat") == [(cats.id, "Where does the CAT sleep?")]
    assert [id for id, _ in found("cat")] == [dogs.id, cats.id]
    assert [id for id, _ in found("cat", limit=1)] == [dogs.id]
    assert found("文章") == [(dogs.id, "日本語の文章 about a cat")]
    assert found("0%") == [(dogs.id, "100% sure")]
    assert found("1_0") == []
    assert served.http.get("/v1/conversations/search", params={"query": "  "}).status_code == 400
    exported = served.http.get(f"/v1/conversations/{cats.id}/export")
    assert exported.headers["content-disposition"] == f'attachment; filename="{cats.id}.json"'
    whole = exported.json()
    assert (whole["id"], whole["metadata"]) == (cats.id, {"a": "b"})
    assert [one["content"][0]["text"] for one in whole["items"]] == ["Where does the CAT sleep?", "On the mat."]


def test_a_long_conversation_is_exported_whole(client, served):
    conversation = client.conversations.create().id
    for start in range(0, 120, 20):
        client.conversations.items.create(conversation, items=turns(*map(str, range(start, start + 20))))
    items = served.http.get(f"/v1/conversations/{conversation}/export").json()["items"]
    assert [item["content"][0]["text"] for item in items] == list(map(str, range(120)))


def test_a_conversation_that_is_full_takes_no_more(client):
    conversation = client.conversations.create().id
    long = turns(*["x" * (1 << 21)] * 1)
    for _ in range(MOST_LETTERS >> 21):
        client.conversations.items.create(conversation, items=long)
    with pytest.raises(BadRequestError, match="begin another one") as full:
        client.conversations.items.create(conversation, items=turns("x"))
    assert full.value.code == "conversation_too_long"


def test_what_is_another_keys_is_not_there(serve):
    served = serve(api_keys=("first", "second"))
    with client_of(served, "first") as first, client_of(served, "second") as second:
        conversation, answer = first.conversations.create(items=turns("secret")), ask(first)
        [item] = first.conversations.items.list(conversation.id).data
        for call in (
            lambda: second.conversations.retrieve(conversation.id),
            lambda: second.conversations.delete(conversation.id),
            lambda: second.conversations.items.create(conversation.id, items=turns("x")),
            lambda: second.conversations.items.retrieve(item.id, conversation_id=conversation.id),
            lambda: second.responses.retrieve(answer.id),
            lambda: second.responses.delete(answer.id),
            lambda: ask(second, conversation=conversation.id),
        ):
            with pytest.raises(NotFoundError):
                call()
        with pytest.raises(BadRequestError, match="there is no previous response"):
            ask(second, previous_response_id=answer.id)
        searched = served.http.get(
            "/v1/conversations/search", params={"query": "secret"}, headers={"Authorization": "Bearer second"}
        )
        assert searched.json()["data"] == []
        assert first.responses.retrieve(answer.id).id == answer.id


def test_what_is_kept_outlives_the_server(lm, made, tmp_path):
    path = shutil.copytree(made, tmp_path / "kb")

    def opened(**more):
        store = rc.StoreConfig(**more)
        return rc.RagCache.open(path, model=lm, method="reposition", embedder=BagOfWords(), store=store)

    with opened() as kb, serving(kb) as served, client_of(served) as client:
        answer, conversation = ask(client), client.conversations.create(items=turns("Who?"))
    with opened() as kb, serving(kb) as served, client_of(served) as client:
        assert client.responses.retrieve(answer.id).output_text == answer.output_text
        assert ask(client, "Why?", previous_response_id=answer.id).output_text
        assert texts_of(client.conversations.items.list(conversation.id)) == ["Who?"]
    with opened(read_only=True) as kb, serving(kb, ServerSettings()) as served, client_of(served) as client:
        assert ask(client, "Why?", previous_response_id=answer.id).store is False  # answered all the same
