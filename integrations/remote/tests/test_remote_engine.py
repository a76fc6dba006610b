"""A store whose model runs in vLLM: what is sent, what is made of the answer, and what goes wrong. vLLM is a double
here; that it answers as the embedded engine does is shown in vLLM's own environment (integrations/vllm/tests)."""

import shutil
import threading
import time

import pytest
import torch
from templates import TOOL_TEMPLATES
from typer.testing import CliRunner

import ragcache as rc
from integrations.remote.tests.vllm_double import VllmDouble, serving
from ragcache.cli.commands import build_app
from ragcache.errors import (
    CancelledError,
    ConfigError,
    ContextTooLongError,
    EngineError,
    ModelMismatchError,
    TimedOutError,
)
from ragcache.kv.block_key import block_key
from ragcache_demo.bag_of_words import BagOfWords
from ragcache_vllm.request_layout import RequestLayout, served_name

QUESTION = "When does the rowing club of Kelbrook meet?"
SAID = "It meets on Monday. Then they row."


@pytest.fixture
def vllm(kb):
    ids = kb.lm.tokenizer(SAID, add_special_tokens=False)["input_ids"]
    with serving(VllmDouble(served_name(kb.lm.fingerprint), ids)) as double:
        yield double


@pytest.fixture
def front(open_kb, vllm):
    """Opens the store with its model elsewhere."""
    return lambda **options: open_kb(model=None, **{"engine": vllm.url, **options})


def layout_of(body) -> RequestLayout | None:
    return RequestLayout.from_params(body.get("kv_transfer_params"))


# What is sent


def test_the_prompt_travels_with_the_places_of_its_blocks(kb, front, vllm):
    answer = front(method="reposition").ask(QUESTION, k=3)
    assert answer.text == SAID
    (body,) = vllm.bodies
    layout, ids = layout_of(body), body["prompt"]
    blocks = [ids[block.start : block.stop] for block in layout.blocks]
    assert blocks[-3:] == [source.chunk.token_ids for source in answer.hits]
    assert [block.start for block in layout.blocks[-2:]] == [block.stop for block in layout.blocks[-3:-1]]
    assert ids[layout.blocks[-1].stop :] == list(kb._engine.prompts.question_ends(QUESTION).suffix_ids)
    assert layout.runs == ()
    assert answer.usage.prompt_tokens == len(ids)
    assert [source.handle for source in answer.hits] == [source.chunk.handle for source in answer.hits]
    assert {source.kv for source in answer.hits} == {"disk"}


def test_a_long_beginning_is_a_block_of_its_own_and_stays(open_kb, front, vllm):
    system = "You are a patient clerk. " * 6
    with open_kb(system=system) as kb:
        kb.ingest(rc.Document("clubs", "The rowing club of Kelbrook meets on Monday, too."))
        first = list(kb._engine.prompts.format.prefix_ids)
        assert kb.doctor().sound
        key = block_key(kb.lm.fingerprint, rc.Recipe(), (), first)
        assert kb.store.documents.referenced([key, "other"]) == {key}
        assert key in set(kb.store.kv.keys())
        block = kb.store.kv.get(key).block
        assert torch.equal(block.layer_keys(0), kb.lm.encode([first])[0].layer_keys(0))
    front(system=system).ask(QUESTION, k=2)
    layout = layout_of(vllm.bodies[0])
    assert layout.prefix == len(first) == layout.blocks[0].stop
    assert vllm.bodies[0]["prompt"][: len(first)] == first
    front().ask(QUESTION, k=2)
    assert layout_of(vllm.bodies[1]).blocks[0].start > 0


@pytest.mark.parametrize("last", [0, 2])
def test_epic_says_which_edges_run_again(front, vllm, last):
    front(method="epic", first_tokens=3, last_tokens=last).ask(QUESTION, k=3)
    layout = layout_of(vllm.bodies[0])
    edges = [edge for start, stop in layout.blocks[-3:] for edge in ((start, start + 3), (stop - last, stop))]
    assert [(run.start, run.stop) for run in layout.runs] == [edge for edge in edges if edge[0] < edge[1]]


def test_text_between_passages_is_no_part_of_a_block(kb, front, vllm):
    one, two = kb.retrieve(QUESTION, k=2)
    turn = {"role": "user", "content": ["[1] ", one, "[2] ", two, QUESTION]}
    answer = front().chat([turn])
    layout, ids = layout_of(vllm.bodies[0]), vllm.bodies[0]["prompt"]
    first, second = layout.blocks[-2:]
    assert [ids[first.start : first.stop], ids[second.start : second.stop]] == [
        hit.chunk.token_ids for hit in (one, two)
    ]
    label = kb.lm.tokenizer("[2] ", add_special_tokens=False)["input_ids"]
    assert ids[first.stop : second.start] == label
    assert layout.runs == ()
    assert [source.chunk.id for source in answer.hits] == [one.chunk.id, two.chunk.id]


def test_full_prefill_sends_no_layout(front, vllm):
    answer = front(method="full").ask(QUESTION, k=3)
    assert "kv_transfer_params" not in vllm.bodies[0]
    assert {source.kv for source in answer.hits} == {"unused"}


def test_sampling_is_the_callers_and_never_the_models_own(front, vllm):
    kb, given = front(), {"max_tokens": 7, "temperature": 0.5, "top_p": 0.9, "top_k": 3, "seed": 5}
    given |= {"min_p": 0.1, "presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.2}
    kb.ask(QUESTION, sampling=rc.Sampling(**given, logit_bias={5: 2.0}, stop_token_ids=[9]))
    kb.ask(QUESTION)
    drawn, greedy = vllm.bodies
    assert drawn.items() >= {**given, "logit_bias": {"5": 2.0}}.items()
    assert drawn["stop_token_ids"][-1] == 9
    assert "logprobs" not in drawn
    assert (greedy["temperature"], greedy["top_p"], greedy["top_k"], greedy["repetition_penalty"]) == (0, 1, 0, 1)


def test_calls_of_tools_are_read_off_the_engines_tokens(kb, front, vllm, monkeypatch):
    call = '<tool_call>{"name": "clock", "arguments": {}}</tool_call>'
    vllm.ids = kb.lm.tokenizer(call, add_special_tokens=False)["input_ids"]
    remote, asked = front(), [{"role": "user", "content": QUESTION}]
    monkeypatch.setattr(remote.lm.tokenizer, "chat_template", TOOL_TEMPLATES["hermes"])
    tools = [{"type": "function", "function": {"name": "clock"}}]
    answer = remote.chat(asked, tools=tools)
    assert [(one.name, one.arguments, one.error) for one in answer.tool_calls] == [("clock", "{}", None)]
    assert '"name": "clock"' in remote.lm.tokenizer.decode(vllm.bodies[0]["prompt"])
    remote.chat(asked, tools=tools, tool_choice="required")
    assert "clock" in vllm.bodies[1]["structured_outputs"]["json"]


def test_a_collections_salt_travels_in_the_layout_and_apart_from_others(kb, front, vllm):
    kb.collection("a").ingest([rc.Document("cats", "Cats sleep by day.")])
    salt = kb.collection("a").chunks()[0].salt
    asked = front(method="reposition")
    asked.collection("a").ask(QUESTION)
    body = vllm.bodies[-1]
    assert salt not in body["cache_salt"]
    assert layout_of(body).block_salt == salt
    asked.ask(
        QUESTION, hits=[*kb.collection("a").retrieve(QUESTION, 1), *kb.collection("default").retrieve(QUESTION, 1)]
    )
    assert "kv_transfer_params" not in vllm.bodies[-1]  # a layout has one salt
    front(method="full").ask(QUESTION)
    assert "cache_salt" not in vllm.bodies[-1]


def test_a_passage_without_kv_makes_an_ordinary_request(kb, front, vllm, caplog):
    kb.store.kv.delete(kb.ask(QUESTION, k=1).hits[0].handle)
    answer = front().ask(QUESTION, k=3)
    assert layout_of(vllm.bodies[0]) is None
    assert {source.kv for source in answer.hits} == {"computed"}
    assert answer.usage.cached_tokens == 0
    assert "1 of 3 passages have no KV yet" in caplog.text


def test_the_key_is_sent_and_never_shown(front, vllm):
    kb = front(engine_key="s3cret")
    kb.ask(QUESTION)
    assert set(vllm.keys) == {"Bearer s3cret"}
    vllm.answer = lambda request: request.whole(401, b'{"error": "Unauthorized"}')
    with pytest.raises(EngineError, match="refused the key; set RAGCACHE_ENGINE_KEY") as failed:
        kb.ask(QUESTION)
    assert "s3cret" not in str(failed.value)


# What is made of the answer


def test_an_answer_ends_at_its_stop_string(front, vllm):
    answer = front().ask(QUESTION, sampling=rc.Sampling(stop=(" Then",)))
    assert (answer.text, answer.finish_reason) == ("It meets on Monday.", "stop")


def test_a_token_that_ends_the_text_is_no_part_of_it(kb, front, vllm):
    vllm.ids = [*vllm.ids, kb.lm.tokenizer.eos_token_id]
    answer = front().ask(QUESTION)
    assert (answer.text, answer.usage.completion_tokens) == (SAID, len(vllm.ids) - 1)
    assert answer.finish_reason == "stop"


def test_an_engine_that_goes_on_behind_the_stop_string_is_stopped(front, vllm):
    vllm.answer = lambda request: request.endless()
    kb = front()
    text = kb.lm.tokenizer.decode(vllm.ids[:1] * 2)
    kb.ask(QUESTION, sampling=rc.Sampling(stop=(text,)))
    assert vllm.left.wait(10)


def test_events_come_in_their_order(front, vllm):
    kinds = [type(event) for event in front().stream(QUESTION)]
    assert kinds[0] is rc.Sources
    assert kinds[-1] is rc.Done
    assert set(kinds[1:-1]) == {rc.Token}


def test_usage_is_the_engines_and_what_it_computed_all_the_same_is_said(front, vllm, caplog):
    kb = front(method="reposition")
    vllm.cached = 12
    usage = kb.ask(QUESTION, k=3).usage
    assert (usage.cached_tokens, usage.computed_tokens) == (12, usage.prompt_tokens - 12)
    assert "tokens that this store's blocks hold" in caplog.text
    caplog.clear()
    vllm.cached = max(block.stop for block in layout_of(vllm.bodies[0]).blocks)
    kb.ask(QUESTION, k=3)
    assert "blocks hold" not in caplog.text


def test_a_conversation_keeps_the_passages_of_its_turns(kb, front, vllm):
    front = front(method="reposition")
    first = front.chat([{"role": "user", "content": QUESTION}], k=1, context="keep")
    asked = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": first.text}]
    second = front.chat([*asked, {"role": "user", "content": "Where does the cat sit?"}], k=1, context="keep")
    layout, ids = layout_of(vllm.bodies[1]), vllm.bodies[1]["prompt"]
    passages = [ids[block.start : block.stop] for block in layout.blocks]
    assert passages[-2:] == [source.chunk.token_ids for source in (*first.hits, *second.hits)]


def test_a_prompt_that_the_engine_is_too_short_for_is_refused_here(front, vllm):
    vllm.longest = 40
    with pytest.raises(ContextTooLongError, match="takes 40"):
        front().ask(QUESTION, k=3)
    assert not vllm.bodies


# The store


def test_no_weights_are_needed(open_kb, model_directory, vllm, tmp_path):
    bare = shutil.copytree(model_directory, tmp_path / "bare", ignore=shutil.ignore_patterns("*.safetensors"))
    kb = open_kb(model=bare, method="reposition", engine=vllm.url)
    assert kb.ask(QUESTION).text == SAID
    assert not isinstance(kb.lm, rc.LanguageModel)


def test_documents_come_and_go_without_kv(front, vllm, caplog):
    kb = front()
    new = rc.Document("new", "The harbour of Selby freezes.")
    with pytest.raises(ConfigError, match='add documents with kv="lazy" here'):
        kb.ingest(new, kv="eager")
    assert kb.ingest(new, progress=True).added == ["new"]
    assert "stored without KV" in caplog.text
    assert kb.ask("Which harbour freezes?", k=1).hits[0].kv == "computed"
    kb.delete("new")
    assert kb.document("new") is None
    assert kb.info().documents == 4
    assert not kb.doctor().damaged


def test_a_store_without_a_model_names_the_way_out(open_kb, vllm, tmp_path):
    with pytest.raises(ConfigError, match="run `ragcache ingest` without an engine first"):
        open_kb(tmp_path / "new", model=None, engine=vllm.url)


def test_a_loaded_model_is_not_taken_beside_an_engine(open_kb, lm, vllm):
    with pytest.raises(ConfigError, match="beside an engine that has its own"):
        open_kb(model=lm, engine=vllm.url)


# Above the engine


def test_the_command_line_asks_it(kb, vllm, tmp_path, monkeypatch):
    monkeypatch.setattr("ragcache.engine.assemble.load_embedder", lambda *_: BagOfWords())
    monkeypatch.setenv("RAGCACHE_ENGINE_KEY", "s3cret")
    arguments = ["ask", QUESTION, "--store", str(tmp_path / "kb"), "--engine", vllm.url]
    result = CliRunner().invoke(build_app(), arguments)
    assert result.exit_code == 0, result.output
    assert SAID in result.output
    assert set(vllm.keys) == {"Bearer s3cret"}


# What goes wrong


@pytest.mark.parametrize("method", ["a3", "prophet", "cacheblend", "samkv", "ape", "concat"])
def test_methods_that_need_the_model_are_refused_by_name(kb, front, vllm, method):
    recipe = rc.METHODS[method].recipes[0]
    message = f"method '{method}' chooses or weighs tokens.*use 'full' or 'reposition' or 'epic'"
    with pytest.raises(ConfigError, match=message):
        front(method=method, recipe=recipe).ask(QUESTION)
    assert not vllm.bodies


def test_a_budget_of_thoughts_is_refused(front, vllm):
    with pytest.raises(ConfigError, match="thinking_budget is kept where the tokens are chosen"):
        front().ask(QUESTION, thinking_budget=8)
    assert not vllm.bodies


@pytest.mark.parametrize(
    "url",
    ["http://127.0.0.1:8100", "127.0.0.1:8100", "vllm://127.0.0.1", "vllm://:8100", "vllm://a:99999", "vllm://a:1/b"],
)
def test_another_kind_of_address_is_refused(kb, front, url):
    with pytest.raises(ConfigError, match="give vllm://host:port"):
        front(engine=url)


def test_an_engine_that_is_not_there(kb, front):
    with pytest.raises(EngineError, match=r"nothing answers at vllm://127\.0\.0\.1:9 .*start it with `ragcache vllm`"):
        front(engine="vllm://127.0.0.1:9")


@pytest.mark.parametrize("answer", [b"<html>", b"{}", b'{"data": [1]}', b"[]"])
def test_something_else_that_answers(front, vllm, answer):
    vllm.models = answer
    with pytest.raises(EngineError, match="but not as vLLM does"):
        front()


def test_another_model_or_no_connector(front, vllm):
    vllm.name = served_name("another")
    with pytest.raises(ModelMismatchError, match=r"does not serve this store's model.*\(tiny, ragcache-another\)"):
        front()


MISSING = b'{"error": {"message": "The model does not exist."}}'
REFUSALS = [
    (404, MISSING, ModelMismatchError, "The model does not exist"),
    *((status, b'{"error": {"message": "not now"}}', EngineError, f"answered {status}: not now")
      for status in (400, 429, 500, 503)),
]  # fmt: skip


@pytest.mark.parametrize(("status", "body", "error", "words"), REFUSALS)
def test_refusals_are_told(front, vllm, status, body, error, words):
    kb = front()
    vllm.answer = lambda request: request.whole(status, body)
    with pytest.raises(error, match=words):
        kb.ask(QUESTION)


ERRORS = [b"", b'data: {"error": {"message": "out of memory"}}\n\n', b"data: {\n\n", b"data: [1]\n\n"]


@pytest.mark.parametrize("end", ERRORS)
def test_a_stream_that_breaks_off(front, vllm, end):
    def breaks(request):
        request.begin()
        request.event(next(vllm.events()))
        request.wfile.write(end)

    vllm.answer = breaks
    with pytest.raises(EngineError, match="broke off"):
        front().ask(QUESTION)


def test_a_question_that_takes_too_long(front, vllm):
    vllm.answer = lambda request: request.silent()
    started = time.perf_counter()
    with pytest.raises(TimedOutError, match=r"no answer within 0\.5 s"):
        front().ask(QUESTION, timeout_s=0.5)
    assert time.perf_counter() - started < 5
    assert vllm.left.wait(10)


@pytest.mark.parametrize("kind", ["silent", "endless"])
def test_a_cancelled_question_stops_the_engine(front, vllm, kind):
    cancelled = threading.Event()

    def answer(request):
        threading.Timer(0.2, cancelled.set).start()
        getattr(request, kind)()

    vllm.answer = answer
    with pytest.raises(CancelledError):
        front().ask(QUESTION, cancelled=cancelled, sampling=rc.Sampling(max_tokens=4000))
    assert vllm.left.wait(10)


def test_a_stream_that_is_not_read_to_its_end_stops_the_engine(front, vllm):
    vllm.answer = lambda request: request.endless()
    events = front().stream(QUESTION, sampling=rc.Sampling(max_tokens=4000))
    for _ in range(3):
        next(events)
    events.close()
    assert vllm.left.wait(10)


def test_neighbours_travel_with_the_places_of_their_blocks(kb, front, vllm, open_kb):
    with open_kb(store=rc.StoreConfig(neighbours=2), method="reposition") as here:
        hits = here.ask(QUESTION, k=3, sampling=rc.Sampling(max_tokens=1)).hits  # computes what is missing
        whole = here._parts.block_keys.with_neighbours([hit.chunk for hit in hits])
    answer = front(method="reposition").ask(QUESTION, k=3)
    layout = layout_of(vllm.bodies[-1])
    assert layout.neighbours[-3:] == tuple(chunk.neighbours for chunk in whole)
    assert all(layout.neighbours[-3:])
    assert answer.hits[0].handle != kb.ask(QUESTION, k=3).hits[0].handle
