"""Ollama's routes through its official client, whose types parse every answer; the engine is the oracle."""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import httpx
import jsonschema
import ollama
import pytest
from engine_texts import TEXTS
from scripted import BROKEN, CALL, SEARCH, THINKS, THOUGHT, script
from serving import Served, serving, wait_for

import ragcache as rc
from ragcache.engine.options import AnswerDefaults
from ragcache_demo.bag_of_words import BagOfWords
from ragcache_ollama.bodies import Turn, messages_of

QUESTION = "Where does the cat sit?"
ASKED = [{"role": "user", "content": QUESTION}]
SHORT = {"num_predict": 8}


@pytest.fixture
def connect() -> Iterator[Callable[..., ollama.Client]]:
    with ExitStack() as stack:
        yield lambda served, **more: stack.enter_context(ollama.Client(served.url, trust_env=False, **more))


@pytest.fixture
def client(connect, served: Served) -> ollama.Client:
    return connect(served)


@pytest.fixture
def converse(agent: Served, connect):
    """Return a function that asks the agent without passages."""
    client, name = connect(agent), f"{agent.service.chat_model}:plain"
    return lambda messages=ASKED, **more: client.chat(name, messages, **{"options": {"num_predict": 300}, **more})


def answered(kb: rc.RagCache, messages=ASKED, **options: object) -> rc.Answer:
    options = {"sampling": rc.Sampling(8), "k": 5, **options}
    kb.chat(messages, **options)  # the first to ask computes the prefix
    return kb.chat(messages, **options)


def test_a_chat_is_the_engines(client, kb):
    messages = [{"role": "system", "content": "Be short."}, *ASKED]
    right = answered(kb, messages)
    found = client.chat("tiny", messages, options=SHORT)
    assert (found.message.role, found.message.content) == ("assistant", right.text)
    assert (found.model, found.done, found.done_reason) == ("tiny", True, "length")
    assert (found.prompt_eval_count, found.eval_count) == (right.usage.prompt_tokens, 8)
    assert found.total_duration >= found.prompt_eval_duration + found.eval_duration - 2 > 0
    *parts, last = client.chat("tiny:latest", messages, options=SHORT, stream=True)
    assert "".join(part.message.content for part in parts) == right.text
    assert not any(part.done for part in parts)
    assert (last.done, last.message.content, last.done_reason, last.eval_count) == (True, "", "length", 8)
    assert last.model == "tiny:latest"


def test_a_prompt_is_a_question_unless_it_is_raw(client, kb):
    right = answered(kb, [{"role": "system", "content": "Be short."}, *ASKED]).text
    assert client.generate("tiny", QUESTION, system="Be short.", options=SHORT).response == right
    raw = kb.complete(QUESTION, sampling=rc.Sampling(8))
    found = client.generate("tiny", QUESTION, raw=True, options=SHORT)
    assert (found.response, found.prompt_eval_count) == (raw.text, raw.usage.prompt_tokens)
    for told, text in (({"system": "Be short."}, right), ({"raw": True}, raw.text)):
        *parts, last = client.generate("tiny", QUESTION, options=SHORT, stream=True, **told)
        assert "".join(part.response for part in parts) == text
        assert (last.done, last.done_reason, last.response) == (True, "length", "")


def test_lines_and_sources_are_json(served, kb):
    """Bodies are as `curl -d` sends them, without a content type of JSON; answers are streams by default."""
    body = json.dumps({"model": "tiny", "messages": ASKED, "options": SHORT, "ragcache": {"k": 2}})
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    response = served.http.post("/api/chat", content=body, headers=form)
    assert response.headers["content-type"].startswith("application/x-ndjson")
    *_, last = map(json.loads, response.text.splitlines())
    assert [one["chunk_id"] for one in last["ragcache"]["sources"]] == [
        hit.chunk.id for hit in answered(kb, k=2).hits
    ]  # fmt: skip


def test_options_are_the_engines(client, served, kb, monkeypatch):
    asked, chat = [], kb.astream_chat

    def record(messages, **options):
        asked.append(options["sampling"])
        return chat(messages, **options)

    monkeypatch.setattr(served.service.kb, "astream_chat", record)
    given = {"temperature": 1.0, "seed": 5, "top_p": 0.9, "top_k": 40, "min_p": 0.01, "repeat_penalty": 1.1}
    given |= {"presence_penalty": 0.1, "frequency_penalty": 0.2, "num_ctx": 4096, "num_gpu": 1}
    sampling = rc.Sampling(
        8, 1.0, 0.9, 40, 5, min_p=0.01, repetition_penalty=1.1, presence_penalty=0.1, frequency_penalty=0.2
    )
    right = kb.chat(ASKED, k=5, sampling=sampling).text
    assert client.chat("tiny", ASKED, options={**SHORT, **given}).message.content == right
    assert asked == [sampling]
    stop = right[3:5]
    assert (
        client.chat("tiny", ASKED, options={**SHORT, **given, "stop": [stop]}).message.content == right.split(stop)[0]
    )
    likely = client.chat("tiny", ASKED, options=SHORT, logprobs=True, top_logprobs=2)
    scores = kb.chat(ASKED, k=5, sampling=rc.Sampling(8, logprobs=2)).logprobs
    assert [one.logprob for one in likely.logprobs] == pytest.approx([one.logprob for one in scores], abs=1e-3)
    assert {len(one.top_logprobs) for one in likely.logprobs} == {2}


@pytest.mark.parametrize("longest", [-2, -1, 0])
def test_an_answer_without_a_limit_ends_by_itself(agent, connect, monkeypatch, longest):
    script(monkeypatch, agent.service.kb.lm, "A river.")
    found = connect(agent).chat(agent.service.chat_model, ASKED, options={"num_predict": longest})
    assert (found.message.content, found.done_reason) == ("A river.", "stop")


def test_the_servers_defaults_give_way_to_none(serve, connect, kb, monkeypatch):
    """A num_predict of -1 means no limit and a seed of -1 no seed, whatever the server's defaults are."""
    asked, chat = [], kb.astream_chat

    def record(messages, **options):
        asked.append(options["sampling"])
        return chat(messages, **{**options, "sampling": rc.Sampling(1)})

    monkeypatch.setattr(kb, "astream_chat", record)
    client = connect(serve(answers=AnswerDefaults(max_tokens=2, seed=7)))
    for options in ({}, {"num_predict": -1}, {"num_predict": -2, "seed": -1}, {"seed": 3}):
        client.chat("tiny", ASKED, options=options)
    assert [(one.max_tokens, one.seed) for one in asked] == [(2, 7), (None, 7), (None, None), (2, 3)]


def test_unknown_fields_are_named(served):
    body = {"model": "tiny", "messages": ASKED, "stream": False, "options": {**SHORT, "mirostat": 1}}
    assert served.http.post("/api/chat", json=body).headers["X-Ragcache-Warning"].endswith(": options.mirostat")


@pytest.mark.parametrize(
    ("path", "asked"), [("/api/chat", {"messages": ASKED}), ("/api/generate", {"prompt": QUESTION})]
)
def test_a_header_names_the_method(served, path, asked):
    for stream in (False, True):
        body = {"model": "tiny", "stream": stream, "options": SHORT, **asked}
        assert served.http.post(path, json=body).headers["X-Ragcache-Method"] == "reposition"


def test_thoughts_are_apart(agent, converse, connect, monkeypatch):
    monkeypatch.setattr(agent.service.kb.lm.tokenizer, "chat_template", THINKS)
    script(monkeypatch, agent.service.kb.lm, *[THOUGHT] * 6)
    whole = converse(think=True)
    assert (whole.message.thinking, whole.message.content) == ("Who is it?", "Jonas.")
    parts = list(converse(think=True, stream=True))
    assert "".join(part.message.thinking or "" for part in parts) == "Who is it?"
    assert "".join(part.message.content for part in parts) == "Jonas."
    assert converse(think=False).prompt_eval_count == whole.prompt_eval_count + len("(quiet)")
    assert converse(think="low").prompt_eval_count == whole.prompt_eval_count + len("low")
    client, name = connect(agent), agent.service.chat_model
    assert client.generate(name, QUESTION, think=True).thinking == "Who is it?"
    assert "".join(part.thinking or "" for part in client.generate(name, QUESTION, stream=True)) == "Who is it?"
    assert set(client.show(name).capabilities) == {"completion", "thinking"}


def test_a_model_that_does_not_think_is_not_asked_to(converse):
    with pytest.raises(ollama.ResponseError, match="does not support thinking") as refused:
        converse(think=True)
    assert refused.value.status_code == 400
    assert converse(think=False).done


def test_tools_are_called_and_their_results_go_back(agent, converse, monkeypatch):
    kb = agent.service.kb
    script(monkeypatch, kb.lm, f"I look.\n{CALL}", f"{CALL}\n{CALL}", BROKEN, "A river.", "A river.")
    found = converse(tools=[SEARCH])
    assert (found.message.content, found.done_reason) == ("I look.", "stop")
    assert [(one.function.name, one.function.arguments) for one in found.message.tool_calls] == [
        ("search", {"name": "Arno"})
    ]
    parts = [part.message.tool_calls for part in converse(tools=[SEARCH], stream=True) if part.message.tool_calls]
    assert [one.function.name for calls in parts for one in calls] == ["search", "search"]
    (broken,) = converse(tools=[SEARCH]).message.tool_calls
    assert broken.function.arguments == {"arguments": BROKEN.splitlines()[1]}
    turns = [*ASKED, found.message, {"role": "tool", "tool_name": "search", "content": "It rises in the hills."}]
    sent = converse(turns, tools=[SEARCH])
    call = {"id": "x", "type": "function", "function": {"name": "search", "arguments": '{"name": "Arno"}'}}
    meant = [*ASKED, {"role": "assistant", "content": "I look.", "tool_calls": [call]}]
    meant.append({"role": "tool", "tool_call_id": "x", "content": "It rises in the hills."})
    right = kb.chat(meant, tools=[SEARCH], sampling=rc.Sampling(300))
    assert (sent.message.content, sent.prompt_eval_count) == ("A river.", right.usage.prompt_tokens)


def test_a_result_belongs_to_the_first_call_of_its_function_that_has_none():
    called = [{"function": {"name": name}} for name in ("search", "clock", "search")]
    found = [{"role": "tool", "tool_name": name} for name in ("clock", "search", "search")]
    turns = [*ASKED, {"role": "assistant", "tool_calls": called}, *found]
    _, calls, *results = messages_of([Turn.model_validate(turn) for turn in turns])
    ids = [call.id for call in calls.tool_calls]
    assert [result.tool_call_id for result in results] == [ids[1], ids[0], ids[2]]
    assert len(set(ids)) == 3


@pytest.mark.parametrize("stream", [False, True])
def test_answers_hold_to_a_form(agent: Served, connect, stream):
    """Even those of a random model."""
    client, name = connect(agent), agent.service.chat_model
    schema = {"type": "object", "properties": {"year": {"type": "integer", "maximum": 1999}}, "required": ["year"]}
    schema["additionalProperties"] = False
    found = client.chat(name, ASKED, format=schema, stream=stream)
    jsonschema.validate(json.loads("".join(one.message.content for one in (found if stream else [found]))), schema)
    found = client.generate(name, QUESTION, format=schema, stream=stream)
    jsonschema.validate(json.loads("".join(one.response for one in (found if stream else [found]))), schema)


def test_any_json_is_a_form(agent, converse, monkeypatch):
    script(monkeypatch, agent.service.kb.lm, 'no JSON {"a": 1}')
    assert converse(format="json").message.content.startswith("{")


def test_embeddings_are_the_embedders(client, kb):
    right = kb.embedder.embed(["a cat", "a dog"])
    found = client.embed("bag-of-words", ["a cat", "a dog"])
    assert (found.model, found.prompt_eval_count > 0) == ("bag-of-words", True)
    assert found.embeddings == right.tolist()
    assert client.embed("bag-of-words:latest", "a cat").embeddings == right[:1].tolist()
    assert client.embed("bag-of-words", "").embeddings == []
    assert client.embed("bag-of-words", ["a cat", "", "a dog"]).embeddings[::2] == right.tolist()
    with pytest.raises(ollama.ResponseError, match="dimensions") as refused:
        client.embed("bag-of-words", "x", dimensions=7)
    assert refused.value.status_code == 400


def test_models_are_listed_and_shown(client, kb):
    listed = {model.model: model for model in client.list().models}
    assert list(listed) == ["tiny:latest", "tiny:plain", "bag-of-words:latest"]
    assert listed["tiny:latest"].size == sum(one.nbytes for one in kb.lm.model.parameters())
    assert listed["tiny:latest"].details.family == "llama"
    assert [model.context_length for model in client.ps().models][:2] == [4096, 4096]
    assert {len(model.digest) for model in (*client.list().models, *client.ps().models)} == {64}
    for name in ("tiny", "tiny:latest", "tiny:plain"):
        shown = client.show(name)
        assert shown.modelinfo["llama.context_length"] == 4096
        assert shown.capabilities == ["completion"]
    embedder = client.show("bag-of-words")
    assert (embedder.capabilities, embedder.modelinfo["embedder.embedding_length"]) == (
        ["embedding"], kb.embedder.dimension,
    )  # fmt: skip
    assert client.chat("tiny:plain", ASKED, options=SHORT).prompt_eval_count < 60


def test_ollamas_programs_find_that_it_runs(served):
    assert served.http.get("/").text == "Ollama is running"
    assert served.http.head("/").status_code == 200


def test_a_name_with_the_usual_tag_may_be_said_without(serve, connect):
    client = connect(serve(model_name="rivers:latest"))
    for name in ("rivers", "rivers:latest"):
        assert client.chat(name, ASKED, options=SHORT).model == name


def test_letters_of_arguments_are_not_written_as_numbers():
    called = [{"function": {"name": "search", "arguments": {"name": "你好"}}}]
    (message,) = messages_of([Turn(role="assistant", tool_calls=called)])
    assert message.tool_calls[0].function.arguments == '{"name": "你好"}'


def test_the_version_is_one_that_clients_can_compare(served):
    version = served.http.get("/api/version").json()["version"]
    assert [int(part) for part in version.split(".")] > [0, 5, 0]


def test_a_model_is_loaded_already(client):
    assert client.chat("tiny", []).done_reason == "load"
    assert {client.generate("tiny", "", keep_alive=time).done_reason for time in (0, "0", "0s")} == {"unload"}
    assert [part.done for part in client.generate("tiny", stream=True)] == [True]


WRONG = [
    ("chat", {"model": "gpt-4", "messages": ASKED}, 404, "'gpt-4' is not served here"),
    ("chat", {"model": "gpt-4", "messages": []}, 404, "'gpt-4' is not served here"),
    ("chat", {"messages": ASKED}, 400, "'model' is missing"),
    ("chat", {"model": "tiny", "messages": "x"}, 400, "messages"),
    ("chat", {"model": "tiny", "messages": [{"role": "king", "content": "x"}]}, 400, "messages[0].role"),
    (
        "chat",
        {"model": "tiny", "messages": [{"role": "user", "content": "x", "images": ["aa"]}]},
        400,
        "reads no images",
    ),
    ("chat", {"model": "tiny", "messages": [{"role": "tool", "content": "x"}]}, 400, "messages[0] answers no call"),
    ("chat", {"model": "tiny", "messages": [{"role": "user", "content": " "}]}, 400, "the question is empty"),
    ("chat", {"model": "tiny", "messages": ASKED, "format": "xml"}, 400, "format"),
    ("chat", {"model": "tiny", "messages": ASKED, "format": {"type": "strange"}}, 400, "cannot be compiled"),
    ("chat", {"model": "tiny", "messages": ASKED, "think": "huge"}, 400, "say true, false, low"),
    ("chat", {"model": "tiny", "messages": ASKED, "options": {"temperature": -1}}, 400, "options.temperature"),
    ("chat", {"model": "tiny", "messages": ASKED, "ragcache": {"method": "x"}}, 400, "choose one of"),
    ("chat", {"model": "tiny", "messages": [{"role": "user", "content": "word " * 5000}]}, 400, "4096"),
    ("generate", {"model": "tiny", "prompt": "x", "suffix": "y"}, 400, "suffix"),
    ("generate", {"model": "tiny", "prompt": "x", "template": "y"}, 400, "own chat template"),
    ("generate", {"model": "tiny", "prompt": "x", "context": [1]}, 400, "as messages to /api/chat"),
    ("generate", {"model": "tiny", "prompt": "x", "raw": True, "system": "y"}, 400, "does not go with raw"),
    ("generate", {"model": "tiny", "prompt": "x", "raw": True, "ragcache": {"k": 2}}, 400, "'ragcache.k' does not go"),
    ("embed", {"model": "tiny", "input": "x"}, 404, "bag-of-words"),
    ("embed", {"model": "bag-of-words", "input": 3}, 400, "input"),
    ("embed", {"model": "bag-of-words", "input": ["x"] * 2049}, 400, "2048 items"),
    ("embed", {"model": "bag-of-words"}, 400, "'input' is missing"),
    ("show", {"model": "gpt-4"}, 404, "'gpt-4' is not served here"),
    ("show", {}, 400, "'model' is missing"),
    ("pull", {"model": "tiny"}, 404, "no such route"),
    ("embeddings", {"model": "bag-of-words", "prompt": "x"}, 404, "no such route"),
]


@pytest.mark.parametrize(("route", "body", "status", "said"), WRONG)
def test_errors_are_ollamas(open_server: Served, route, body, status, said):
    response = open_server.http.post(f"/api/{route}", json=body)
    assert response.status_code == status, response.text
    assert list(response.json()) == ["error"]
    assert said in response.json()["error"]


@pytest.fixture(scope="module")
def open_server(lm, tmp_path_factory):
    with rc.RagCache.open(tmp_path_factory.mktemp("open") / "kb", model=lm, embedder=BagOfWords()) as kb:
        kb.ingest(rc.Document("cats", TEXTS["cats"]))
        with serving(kb) as served:
            yield served


def test_whatever_is_no_request_gets_ollamas_error_too(open_server: Served):
    answers = [
        open_server.http.post("/api/chat", content=b"{"),
        open_server.http.post("/api/generate", content=b"[" * 100_000),
        open_server.http.get("/api/chat"),
        open_server.http.post("/api/chat", content=b" " * 5_000_000),
        open_server.http.post("/api/chat", json={}, headers={"Origin": "http://evil.example"}),
    ]
    assert [(one.status_code, type(one.json()["error"])) for one in answers] == [
        (400, str), (400, str), (405, str), (413, str), (403, str),
    ]  # fmt: skip
    assert isinstance(open_server.http.get("/v1/nothing").json()["error"], dict)


def test_an_error_amid_a_stream_is_its_last_line(served, client, monkeypatch, kb):
    stream = client.chat("tiny", ASKED, stream=True, options={"num_predict": 4000})
    next(stream)
    served.service.cancel_all()
    with pytest.raises(ollama.ResponseError, match="shutting down"):
        list(stream)


def test_keys_guard_the_routes(serve, connect):
    served = serve(api_keys=["secret"])
    for method, route in (("POST", "chat"), ("POST", "embed"), ("GET", "tags"), ("GET", "ps"), ("POST", "show")):
        response = served.http.request(method, f"/api/{route}")
        assert (response.status_code, type(response.json()["error"])) == (401, str), route
    with pytest.raises(ollama.ResponseError, match="API key is needed"):
        connect(served).chat("tiny", ASKED)
    keyed = connect(served, headers={"Authorization": "Bearer secret"})
    assert keyed.list().models


def test_a_client_that_hangs_up_frees_its_slot(serve, connect):
    served = serve(slots=1)
    client = connect(served)
    for ask in (lambda **more: client.chat("tiny", ASKED, **more), lambda **more: client.generate("tiny", "x", **more)):
        stream = ask(stream=True, options={"num_predict": 4000})
        next(stream)
        assert served.service.slots.in_use == 1
        stream.close()
        wait_for(lambda: served.service.slots.in_use == 0)
    impatient = connect(served, timeout=0.2)
    with pytest.raises(httpx.ReadTimeout):
        impatient.chat("tiny", ASKED, options={"num_predict": 4000})
    wait_for(lambda: served.service.slots.in_use == 0)
    assert 'ragcache_tokens_total{kind="completion"}' not in served.http.get("/metrics").text  # no answer was completed
    client.chat("tiny", ASKED, options=SHORT)
    assert 'ragcache_tokens_total{kind="completion"} 8.0' in served.http.get("/metrics").text
