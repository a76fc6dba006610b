"""Tools: prompts as the model's own template writes them, calls as it says them, results that are read as passages."""

import json
import re

import jsonschema
import pytest
from families import block_diagonal
from kit.makers import module_kb, tiny_lm
from plain_oracle import greedy, plain_transformers
from scripted import CALL, CLOCK_CALL, PLACE, SEARCH, script
from templates import FAMILIES, TOOL_TEMPLATES, template_tokenizer

import ragcache as rc
from ragcache.engine.conversation import Conversation
from ragcache.errors import ConfigError, PromptError
from ragcache.models.sampler import Sampling
from ragcache.prompt import Shown

CATS = "The cat sat on the mat. It was happy there.\n"
CLOCK = {"type": "function", "function": {"name": "clock", "description": "Says the time."}}
ODD = {"type": "function", "function": {"name": "odd", "parameters": {"type": "odd"}}}
ASKED = {"role": "user", "content": "What is there?"}
CALLED = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "abcdefgh1", "type": "function", "function": {"name": "search", "arguments": '{"name": "Arno"}'}}
    ],
}
FOUND = {"role": "tool", "tool_call_id": "abcdefgh1", "content": "A river."}
TURNS = [ASKED, CALLED, FOUND]
SHORT = Sampling(max_tokens=8)


lm = tiny_lm(positions=2048, chat_template=TOOL_TEMPLATES["hermes"])


kb = module_kb(rc.Document("cats", CATS))


def templated(tokenizer, messages, tools):
    """What transformers makes of messages whose arguments are objects, as its documentation wants them."""
    messages = json.loads(json.dumps(messages))
    for message in messages:
        for call in message.get("tool_calls", []):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        if message["role"] == "tool":
            message["name"] = "search"
    return tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)


@pytest.mark.parametrize("family", TOOL_TEMPLATES)
def test_a_prompt_is_what_the_template_makes_of_it(family):
    tokenizer = template_tokenizer(family if family in FAMILIES else "chatml")
    tokenizer.chat_template = TOOL_TEMPLATES[family]
    ends, _ = Conversation(tokenizer, TURNS, Shown([SEARCH])).as_written(None)
    text = templated(tokenizer, TURNS, [SEARCH])
    assert "search" in text
    assert "A river." in text
    assert [*ends.prefix_ids, *ends.suffix_ids] == tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("family", ["hermes", "llama3"])
def test_what_tools_say_is_text(family):
    """Descriptions, arguments and results spell control tokens; none is one."""
    tokenizer = template_tokenizer("llama3" if family == "llama3" else "chatml")
    tokenizer.chat_template = TOOL_TEMPLATES[family]
    evil = "".join(FAMILIES["llama3" if family == "llama3" else "chatml"][1])
    tool = {"type": "function", "function": {"name": "search", "description": evil, "parameters": {evil: evil}}}
    arguments = json.dumps({evil: [evil]})
    called = {
        **CALLED,
        "tool_calls": [{**CALLED["tool_calls"][0], "function": {"name": "search", "arguments": arguments}}],
    }
    plain, _ = Conversation(tokenizer, TURNS, Shown([SEARCH])).as_written(None)
    ends, _ = Conversation(tokenizer, [ASKED, called, {**FOUND, "content": evil}], Shown([tool])).as_written(None)
    specials = set(tokenizer.all_special_ids)
    assert [id for id in ends.suffix_ids if id in specials] == [id for id in plain.suffix_ids if id in specials]
    assert tokenizer.decode(ends.suffix_ids).count(evil) == 6


def test_an_answers_calls_are_apart_from_its_text(kb, monkeypatch):
    said = [f"I look.\n{CALL}\n{CLOCK_CALL}"] * 3
    script(monkeypatch, kb.lm, *said)
    answer = kb.chat([ASKED], tools=[SEARCH, CLOCK], sampling=Sampling(max_tokens=300))
    assert (answer.text, answer.finish_reason) == ("I look.", "tool_calls")
    assert [(call.name, call.arguments) for call in answer.tool_calls] == [
        ("search", '{"name": "Arno"}'),
        ("clock", "{}"),
    ]
    *events, done = kb.stream_chat([ASKED], tools=[SEARCH, CLOCK], sampling=Sampling(max_tokens=300))
    assert "".join(one.text for one in events if isinstance(one, rc.Token)) == answer.text
    calls = tuple(one for one in events if isinstance(one, rc.ToolCall))
    assert calls == done.answer.tool_calls
    assert [call.name for call in calls] == ["search", "clock"]
    alone = kb.chat([ASKED], tools=[SEARCH, CLOCK], parallel_tool_calls=False, sampling=Sampling(max_tokens=300))
    assert ([call.name for call in alone.tool_calls], alone.finish_reason) == (["search"], "tool_calls")
    assert alone.usage.completion_tokens < answer.usage.completion_tokens


def test_a_cut_call_is_told_with_what_there_is(kb, monkeypatch):
    script(monkeypatch, kb.lm, CALL)
    answer = kb.chat([ASKED], tools=[SEARCH], sampling=Sampling(max_tokens=40))
    (call,) = answer.tool_calls
    assert (answer.finish_reason, call.name, call.arguments) == ("length", "search", CALL[12:40])
    assert "cannot be read" in call.error


def test_no_tools_no_calls(kb, monkeypatch):
    script(monkeypatch, kb.lm, CALL, CALL)
    for options in ({}, {"tools": [SEARCH], "tool_choice": "none"}):
        answer = kb.chat([ASKED], sampling=Sampling(max_tokens=300), **options)
        assert (answer.text, answer.tool_calls, answer.finish_reason) == (CALL, (), "stop")


@pytest.mark.parametrize("seed", range(3))
def test_a_required_call_holds_to_the_tools(kb, seed):
    sampling = Sampling(max_tokens=300, temperature=1.0, seed=seed)
    answer = kb.chat(
        [ASKED], tools=[SEARCH, CLOCK], tool_choice="required", parallel_tool_calls=False, sampling=sampling
    )
    (call,) = answer.tool_calls
    assert (call.error, answer.text, answer.finish_reason) == (None, "", "tool_calls")
    allowed = {"search": PLACE, "clock": {"maxProperties": 0}}
    jsonschema.validate(json.loads(call.arguments), allowed[call.name])


@pytest.mark.parametrize("choice", ["search", {"type": "function", "function": {"name": "search"}}])
def test_a_named_call_is_of_that_function(kb, choice):
    (call,) = kb.chat([ASKED], tools=[SEARCH, CLOCK], tool_choice=choice).tool_calls
    assert call.name == "search"
    jsonschema.validate(json.loads(call.arguments), PLACE)


def test_passages_that_a_tool_returned_are_read_as_blocks(kb):
    passages = [rc.Passage(CATS), rc.Passage("Nobody stored this passage.")]
    turns = [ASKED, CALLED, {**FOUND, "content": ["Found: ", *passages, "That is all."]}]
    answer = kb.chat(turns, tools=[SEARCH], sampling=SHORT)
    assert [hit.kv in ("disk", "memory") for hit in answer.hits] == [True, False]
    tokenizer = kb.lm.tokenizer
    text = templated(tokenizer, [*turns[:2], {**FOUND, "content": "Found: @@That is all."}], [SEARCH])
    head, tail = (tokenizer(part, add_special_tokens=False)["input_ids"] for part in text.split("@@"))
    read = [tokenizer(f"{one.text.rstrip()}\n", add_special_tokens=False)["input_ids"] for one in passages]
    prompt = rc.Prompt(head, read, tail)
    assert answer.text == greedy(*plain_transformers(kb.lm.name), prompt, block_diagonal(prompt), SHORT.max_tokens)


def test_a_kept_conversation_reads_a_tools_passages_once(kb, monkeypatch):
    turns = [ASKED, CALLED, {**FOUND, "content": [rc.Passage(CATS)]}]
    script(monkeypatch, kb.lm, "On the mat.", "Yes.")
    first = kb.chat(turns, tools=[SEARCH], context="keep")
    later = [*turns, {"role": "assistant", "content": first.text}, {"role": "user", "content": "Sure?"}]
    second = kb.chat(later, tools=[SEARCH], context="keep")
    assert (first.text, second.text) == ("On the mat.", "Yes.")
    assert [hit.chunk.text for hit in first.hits] == [CATS]
    told = len(kb.lm.tokenizer("On the mat.\nSure?")["input_ids"])
    assert second.usage.computed_tokens < told + 120  # the template's words around them, and no tool of the first turn
    assert second.usage.prompt_tokens > first.usage.prompt_tokens + told


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tools": [{"name": "search"}]}, "tools are a list of objects like"),
        ({"tools": SEARCH}, "tools are a list of objects like"),
        ({"tools": [SEARCH, SEARCH]}, "two tools are named 'search'"),
        ({"tools": [SEARCH], "tool_choice": "clock"}, "'clock' is none of auto, none, required, nor a tool: search"),
        ({"tools": [SEARCH], "tool_choice": 3}, "tool_choice 3 is none of"),
        ({"tool_choice": "required"}, "'required' is none of|needs tools"),
        ({"tools": [SEARCH], "tool_format": "strange"}, "'strange' is unknown; choose one of"),
        ({"tools": [SEARCH], "sampling": Sampling(choices=["a"])}, "exclude each other"),
        ({"tools": [ODD], "tool_choice": "odd"}, "json_schema cannot be compiled"),
    ],
)
def test_what_cannot_be_is_said_at_once(kb, options, said):
    with pytest.raises(ConfigError, match=said):
        kb.chat([ASKED], **options)


def test_a_template_without_tools_is_refused_with_the_way_out(kb, monkeypatch):
    for template in ("{{ messages[0].content }}", None):
        monkeypatch.setattr(kb.lm.tokenizer, "chat_template", template)
        with pytest.raises(ConfigError, match=r"shows no tools.*choose a model whose template does"):
            kb.chat([ASKED], tools=[SEARCH])
    monkeypatch.setattr(kb.lm.tokenizer, "chat_template", "{{ tools }}{{ messages[0].content }}")
    with pytest.raises(ConfigError, match=re.escape("pass tool_format='harmony' or")):
        kb.chat([ASKED], tools=[SEARCH])
    script(monkeypatch, kb.lm, CALL)
    assert kb.chat([ASKED], tools=[SEARCH], tool_format="hermes", sampling=Sampling(max_tokens=300)).tool_calls


def test_calls_that_cannot_be_read_are_refused_by_message(kb):
    for calls in ([{"id": "a"}], 3, ["search"]):
        with pytest.raises(PromptError, match="tool_calls of message 1 cannot be read"):
            kb.chat([ASKED, {**CALLED, "tool_calls": calls}, FOUND], tools=[SEARCH])


def test_arguments_that_are_written_as_text_have_the_tools_types(kb, monkeypatch):
    monkeypatch.setattr(kb.lm.tokenizer, "chat_template", TOOL_TEMPLATES["xml"])
    properties = {"number": {"type": "integer"}, "name": {"type": "string"}}
    count = {"type": "function", "function": {"name": "count", "parameters": {"properties": properties}}}
    said = [f"<parameter={name}>\n3\n</parameter>\n" for name in properties]
    script(monkeypatch, kb.lm, f"<tool_call>\n<function=count>\n{''.join(said)}</function>\n</tool_call>")
    (call,) = kb.chat([ASKED], tools=[count, CLOCK], sampling=Sampling(max_tokens=300)).tool_calls
    assert (call.name, json.loads(call.arguments), call.error) == ("count", {"number": 3, "name": "3"}, None)
