"""Anthropic's routes through its official client, whose types parse every answer; the engine is the oracle."""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import anthropic
import pytest
from engine_texts import TEXTS
from scripted import CALL, PLACE, THINKS, THOUGHT, script
from serving import Served, events, serving

import ragcache as rc
from ragcache.engine.keys import Key, digest_of, write_key_file
from ragcache.server.settings import ServerSettings
from ragcache_demo.bag_of_words import BagOfWords

QUESTION = "Where does the cat sit?"
ASKED = [{"role": "user", "content": QUESTION}]
SEARCH = {"name": "search", "description": "Finds texts.", "input_schema": PLACE}
POINT = {"type": "ephemeral"}
PIXEL = {"type": "base64", "media_type": "image/png", "data": "aaaa"}
LONG = " ".join(f"Rule {number}: the cat sits on mat {number * 7}." for number in range(20))


def text(words: str, **more: object) -> dict[str, object]:
    return {"type": "text", "text": words, **more}


@pytest.fixture
def connect() -> Iterator[Callable[..., anthropic.Anthropic]]:
    with ExitStack() as stack:

        def connected(served: Served, key: str = "none", **more: object) -> anthropic.Anthropic:
            return stack.enter_context(anthropic.Anthropic(base_url=served.url, api_key=key, max_retries=0, **more))

        yield connected


@pytest.fixture
def say(served, connect):
    """Ask the tiny model for 8 tokens without passages."""
    client = connect(served)
    return lambda messages=ASKED, **more: client.messages.create(
        **{"model": "tiny:plain", "max_tokens": 8, "messages": messages, **more}
    )


@pytest.fixture
def converse(agent, connect):
    """Ask the agent without passages."""
    client, name = connect(agent), f"{agent.service.chat_model}:plain"
    return lambda messages=ASKED, **more: client.messages.create(
        **{"model": name, "max_tokens": 300, "messages": messages, **more}
    )


def read(usage: anthropic.types.Usage) -> int:
    return usage.input_tokens + usage.cache_creation_input_tokens + usage.cache_read_input_tokens


def test_a_message_is_the_engines_answer(served, connect, kb):
    told = [{"role": "system", "content": "Be short.\n\nBe kind."}, *ASKED]
    right = kb.chat(told, k=5, sampling=rc.Sampling(8))
    asked = {"model": "tiny", "max_tokens": 8, "messages": ASKED, "system": [text("Be short."), text("Be kind.")]}
    found = connect(served).messages.create(**asked)
    assert (found.type, found.role, found.model, found.stop_reason) == ("message", "assistant", "tiny", "max_tokens")
    assert [(one.type, one.text) for one in found.content] == [("text", right.text)]
    assert (read(found.usage), found.usage.output_tokens) == (right.usage.prompt_tokens, 8)
    assert [one["chunk_id"] for one in found.ragcache["sources"]] == [hit.chunk.id for hit in right.hits]
    with connect(served).messages.stream(**asked) as stream:
        assert "".join(stream.text_stream) == right.text
        whole = stream.get_final_message()
    assert (whole.stop_reason, read(whole.usage)) == ("max_tokens", right.usage.prompt_tokens)
    assert [(one.type, one.text) for one in whole.content] == [("text", right.text)]


def test_a_stream_has_anthropics_events(served):
    body = {"model": "tiny:plain", "max_tokens": 3, "messages": ASKED, "stream": True}
    with served.http.stream("POST", "/v1/messages", json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        found = [(name, json.loads(data)) for name, data in events(response.iter_lines())]
    assert all(name == data["type"] for name, data in found)
    names = [name for name, _ in found]
    assert names[:2] == ["message_start", "content_block_start"]
    assert set(names[2:-3]) == {"content_block_delta"}
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert found[1][1]["content_block"] == {"type": "text", "text": "", "citations": None}


def test_an_answer_can_be_begun_for_the_model(say, kb):
    begun = [*ASKED, {"role": "assistant", "content": "The cat"}]
    assert say(begun).content[0].text == kb.chat(begun, sampling=rc.Sampling(8)).text


def test_a_stop_sequence_is_named(say, kb):
    whole = kb.chat(ASKED, sampling=rc.Sampling(8)).text
    stop = whole[3:5]
    found = say(stop_sequences=["never said", stop])
    assert (found.stop_reason, found.stop_sequence, found.content[0].text) == (
        "stop_sequence",
        stop,
        whole.split(stop)[0],
    )


def test_an_answer_that_ends_by_itself_ends_its_turn(agent, converse, monkeypatch):
    script(monkeypatch, agent.service.kb.lm, "A river.")
    found = converse(stop_sequences=["never said"])
    assert (found.content[0].text, found.stop_reason, found.stop_sequence) == ("A river.", "end_turn", None)


def test_tools_are_called_and_their_results_go_back(agent, converse, connect, monkeypatch):
    kb = agent.service.kb
    script(monkeypatch, kb.lm, f"I look.\n{CALL}", f"I look.\n{CALL}\n{CALL}", "A river.", "A river.")
    found = converse(tools=[SEARCH])
    said, call = found.content
    assert (said.text, call.type, call.name, call.input) == ("I look.", "tool_use", "search", {"name": "Arno"})
    assert found.stop_reason == "tool_use"
    asked = {"model": found.model, "max_tokens": 300, "messages": ASKED, "tools": [SEARCH]}
    with connect(agent).messages.stream(**asked) as stream:
        streamed = stream.get_final_message()
    assert [one.type for one in streamed.content] == ["text", "tool_use", "tool_use"]
    assert [one.input for one in streamed.content[1:]] == [{"name": "Arno"}] * 2
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [text("It rises in "), text("the hills.")]}
    turns = [
        *ASKED,
        {"role": "assistant", "content": found.content},
        {"role": "user", "content": [result, text("So?")]},
    ]
    sent = converse(turns, tools=[SEARCH])
    meant_call = {"id": "x", "type": "function", "function": {"name": "search", "arguments": '{"name": "Arno"}'}}
    meant = [*ASKED, {"role": "assistant", "content": "I look.", "tool_calls": [meant_call]}]
    meant += [
        {"role": "tool", "tool_call_id": "x", "content": "It rises in the hills."},
        {"role": "user", "content": "So?"},
    ]
    tools = [{"type": "function", "function": {"name": "search", "description": "Finds texts.", "parameters": PLACE}}]
    right = kb.chat(meant, tools=tools, sampling=rc.Sampling(300))
    assert (sent.content[0].text, read(sent.usage)) == ("A river.", right.usage.prompt_tokens)


def test_a_tool_can_be_required(converse):
    """Even a random model's answer is a call, because no other answer is allowed."""
    pytest.importorskip("llguidance")
    for choice in ({"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "search"}):
        (call,) = converse(tools=[SEARCH], tool_choice=choice).content
        assert (call.name, call.input["name"] in ("Kelbrook", "Arno")) == ("search", True)
    assert converse(tools=[SEARCH], tool_choice={"type": "none"}, max_tokens=4).stop_reason == "max_tokens"


def test_thoughts_are_blocks_of_their_own(agent, converse, connect, monkeypatch):
    monkeypatch.setattr(agent.service.kb.lm.tokenizer, "chat_template", THINKS)
    script(monkeypatch, agent.service.kb.lm, *[THOUGHT] * 5)
    thinking = {"type": "enabled", "budget_tokens": 1024}
    whole = converse(thinking=thinking)
    assert [(one.type, getattr(one, one.type)) for one in whole.content] == [
        ("thinking", "Who is it?"),
        ("text", "Jonas."),
    ]
    asked = {"model": whole.model, "max_tokens": 300, "messages": ASKED, "thinking": thinking}
    with connect(agent).messages.stream(**asked) as stream:
        streamed = stream.get_final_message().content
    assert [(one.type, getattr(one, one.type)) for one in streamed] == [("thinking", "Who is it?"), ("text", "Jonas.")]
    hidden = converse(thinking={"type": "adaptive", "display": "omitted"})
    assert [getattr(one, one.type) for one in hidden.content] == ["", "Jonas."]
    assert read(converse(thinking={"type": "disabled"}).usage) == read(whole.usage) + len("(quiet)")
    again = [*ASKED, {"role": "assistant", "content": whole.content}, *ASKED]  # thoughts that come back are not read
    assert converse(again).content[-1].text == "Jonas."


def test_documents_are_read_as_text(say, kb):
    source = {"type": "text", "media_type": "text/plain", "data": "The cat sits on the mat."}
    block = {"type": "document", "title": "Cats", "source": source}
    found = say([{"role": "user", "content": [block, text(QUESTION)]}])
    right = kb.chat(
        [{"role": "user", "content": f"Cats\nThe cat sits on the mat.\n\n{QUESTION}"}], sampling=rc.Sampling(8)
    )
    assert (found.content[0].text, read(found.usage)) == (right.text, right.usage.prompt_tokens)


def turn(block: dict[str, object], role: str = "user") -> list[dict[str, object]]:
    return [{"role": role, "content": [block]}]


PDF = {"type": "document", "source": {**PIXEL, "media_type": "application/pdf"}}
THOUGHTS = {"type": "thinking", "thinking": "x", "signature": "", "cache_control": POINT}
REFUSED = [
    ({"messages": turn({"type": "image", "source": PIXEL})}, r"messages\[0\].*'image'"),
    ({"messages": turn(PDF)}, "source is text"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, r"tools\[0\]"),
    ({"extra_body": {"mcp_servers": [{"url": "http://x"}]}}, "mcp_servers"),
    ({"system": [text(" ", cache_control=POINT)]}, "empty text"),
    ({"system": [text("a", cache_control={"type": "ephemeral", "ttl": "2h"})]}, "ttl"),
    ({"system": [text("a", cache_control=POINT)] * 5}, "at most 4"),
    ({"messages": [*ASKED, *turn(THOUGHTS, "assistant"), *ASKED]}, "cache_control"),
    ({"messages": turn({"type": "tool_use", "id": "a", "name": "b", "input": {}})}, "tool_use"),
    ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "does not have it think"),
    ({"model": "claude"}, "not served here"),
]


@pytest.mark.parametrize(("more", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_what_cannot_be_done_is_refused_by_name(say, more, words):
    with pytest.raises(anthropic.APIStatusError, match=words) as refused:
        say(**more)
    kinds = {400: "invalid_request_error", 404: "not_found_error"}
    assert refused.value.body["type"] == "error"
    assert refused.value.body["error"]["type"] == kinds[refused.value.status_code]


def test_keys_are_read_as_anthropics_client_sends_them(serve, connect):
    served = serve(api_keys=("sesame",))
    asked = {"model": "tiny:plain", "max_tokens": 2, "messages": ASKED}
    assert connect(served, "sesame").messages.create(**asked).usage.output_tokens == 2
    with pytest.raises(anthropic.AuthenticationError) as refused:
        connect(served, "wrong").messages.create(**asked)
    assert refused.value.body["error"]["type"] == "authentication_error"


def test_counted_tokens_are_those_of_the_message(say, served, connect, agent, converse):
    turns = [*ASKED, {"role": "assistant", "content": "On the mat."}, *ASKED]
    for messages in (ASKED, turns):
        counted = connect(served).messages.count_tokens(model="tiny:plain", messages=messages, system="Be short.")
        assert counted.input_tokens == read(say(messages, system="Be short.").usage)
    name = f"{agent.service.chat_model}:plain"
    counted = connect(agent).messages.count_tokens(model=name, messages=ASKED, tools=[SEARCH])
    assert counted.input_tokens == read(converse(tools=[SEARCH], max_tokens=2).usage)


@pytest.fixture
def tight(lm, tmp_path) -> Iterator[Served]:
    """Return a server whose prefix tree has room for about two of `LONG`."""
    room = 2 * len(lm.tokenizer(LONG)["input_ids"]) + 400
    config = rc.StoreConfig(prefix_bytes=room * 2 * lm.config.num_hidden_layers * 64 * 4, foreign_cache=0)
    with rc.RagCache.open(tmp_path / "kb", model=lm, embedder=BagOfWords(), store=config) as kb:
        tree = kb._engine.prefixes._tree
        tree.budget_bytes = room * tree.token_bytes  # the tokens above, whatever the model's shape
        kb.ingest(rc.Document("cat", TEXTS["rivers"]))
        for name in "ab":
            kb.collection(name)
        keys = [
            Key(id, digest_of(id.encode()), reads=frozenset(reads), writes=frozenset(reads))
            for id, reads in (("root", "*"), ("alice", "a"), ("bob", "b"))
        ]
        write_key_file(tmp_path / "keys.toml", keys)
        with serving(kb, ServerSettings(key_file=tmp_path / "keys.toml")) as served:
            yield served


@pytest.mark.parametrize("pinned", [True, False])
def test_a_cache_point_keeps_its_prefix(tight, connect, pinned, monkeypatch):
    """Other prompts fill the tree, and evict everything that is not pinned."""
    client, system = connect(tight, "root"), [text(LONG, **({"cache_control": POINT} if pinned else {}))]

    def ask(question: str, system: list) -> anthropic.types.Usage:
        messages = [{"role": "user", "content": question}]
        return client.messages.create(model="tiny:plain", max_tokens=2, messages=messages, system=system).usage

    tight.service.kb.chat([{"role": "user", "content": "warm"}], sampling=rc.Sampling(1))
    first, size = ask("One?", system), tight.service.kb.count_tokens(LONG)
    assert (first.cache_creation_input_tokens >= size) == pinned
    again = ask("Two?", system)
    assert again.cache_read_input_tokens >= size
    assert again.cache_creation_input_tokens == 0
    for number in range(4):
        ask("Else?", [text(f"{number} {LONG}")])
    assert (ask("Three?", system).cache_read_input_tokens >= size) == pinned


def test_a_cache_point_without_room_created_nothing(tight, connect):
    """The key that keeps most loses its cache point: its prompt counts as input, as below the minimum in Anthropic's
    API.
    """

    def ask(key: str, said: str) -> anthropic.types.Usage:
        asked = {"model": "tiny:plain", "max_tokens": 2, "messages": ASKED, "system": [text(said, cache_control=POINT)]}
        return connect(tight, key).messages.create(**asked).usage

    size = tight.service.kb.count_tokens(LONG)
    assert ask("alice", LONG).cache_creation_input_tokens >= size
    refused = ask("bob", f"And {LONG}")
    assert refused.cache_creation_input_tokens == 0
    assert refused.input_tokens >= size
    assert ask("alice", LONG).cache_read_input_tokens >= size


def test_points_in_turns_and_tools_pin_what_comes_before(agent, converse, monkeypatch):
    pins, tree = [], agent.service.kb._engine.prefixes._tree
    monkeypatch.setattr(tree, "pin", lambda *given: pins.append(given) or 0)
    turns = [
        {"role": "user", "content": [text("One."), text("Two.", cache_control={**POINT, "ttl": "1h"})]},
        {"role": "assistant", "content": [text("Three.")]},
        {"role": "user", "content": [text("Four."), text("Five?")]},
    ]
    converse(turns, tools=[{**SEARCH, "cache_control": POINT}], cache_control=POINT, max_tokens=2)
    decode = agent.service.kb.lm.tokenizer.decode
    (tools, five), (two, hour), (last, _) = [(decode(ids), ttl_s) for _, ids, ttl_s in pins]
    assert (five, hour) == (300, 3600)
    assert "Finds texts." in tools
    assert "One." not in tools
    assert "Two." in two
    assert "Three." not in two
    assert "Five?" in last
