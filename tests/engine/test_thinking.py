"""Models that think before they answer: thoughts apart from the answer, told and limited by the caller."""

import json

import jsonschema
import pytest
from kit.makers import module_kb, tiny_lm
from scripted import PLACE, SEARCH, script
from templates import CHATML

import ragcache as rc
from ragcache.engine.conversation import Conversation
from ragcache.errors import ConfigError
from ragcache.models.sampler import Sampling
from ragcache.models.thoughts import EFFORTS, FORMS, thinking_of
from ragcache.prompt import Shown

ASKED = {"role": "user", "content": "Where does the Arno rise?"}
TURN = "{% for m in messages %}{{ '[' + m.role + ']' + m.content.split('</think>')[-1] }}{% endfor %}"
TOOLS = "{% if tools %}<tool_call>{{ tools | tojson }}{% endif %}"
BEGIN = "{% if add_generation_prompt %}{{ '[assistant]' + BEGUN }}{% endif %}"
TEMPLATES = {
    # As Qwen3: the model opens its thoughts, unless the template has closed them.
    "asked": CHATML,
    # As DeepSeek-R1 and Qwen3's thinking models: the template opens them.
    "begun": TOOLS + TURN + BEGIN.replace("BEGUN", "'<think>\n'"),
    # As Magistral.
    "brackets": TOOLS + TURN + BEGIN.replace("BEGUN", "'' if enable_thinking == false else '[THINK]'"),
    # As GPT-OSS.
    "channels": "{{ reasoning_effort }}" + TURN + BEGIN.replace("BEGUN", "''") + "{# <|channel|>analysis<|message|> #}",
}
THOUGHT, TEXT = "Hills. \n\nMount Falterona?", "On Falterona."
SAID = {
    "asked": f"<think>\n{THOUGHT}\n</think>\n\n{TEXT}",
    "begun": f"{THOUGHT}\n</think>\n\n{TEXT}",
    "brackets": f"{THOUGHT}[/THINK]{TEXT}",
    "channels": f"<|channel|>analysis<|message|>{THOUGHT}<|end|><|start|>assistant<|channel|>final<|message|>{TEXT}",
}
LONG = Sampling(max_tokens=300)


lm = tiny_lm(positions=2048, chat_template=CHATML)


kb = module_kb(rc.Document("arno", "The Arno rises on Mount Falterona."))


@pytest.fixture(params=TEMPLATES)
def form(request, lm, monkeypatch):
    monkeypatch.setattr(lm.tokenizer, "chat_template", TEMPLATES[request.param])
    return request.param


def rendered(lm, shown, *turns):
    """The prompt's text, as the engine makes it."""
    ends, _ = Conversation(lm.tokenizer, turns or [ASKED], Shown(variables=shown)).as_written(None)
    return lm.tokenizer.decode([*ends.prefix_ids, *ends.suffix_ids])


def test_thoughts_are_apart_from_the_answer(kb, form, monkeypatch):
    script(monkeypatch, kb.lm, SAID[form], SAID[form])
    answer = kb.chat([ASKED], sampling=LONG)
    assert (answer.reasoning, answer.text, answer.finish_reason) == (THOUGHT, TEXT, "stop")
    with_marks = SAID[form].partition(TEXT)[0].partition("<|start|>")[0]
    assert len(THOUGHT) < answer.usage.reasoning_tokens <= len(with_marks)  # a byte is a token
    assert answer.usage.completion_tokens == len(SAID[form])
    assert answer.to_json()["reasoning"] == THOUGHT
    *events, done = kb.stream_chat([ASKED], sampling=LONG)
    assert done.answer.reasoning == "".join(one.text for one in events if isinstance(one, rc.Reasoning)) == THOUGHT
    assert "".join(one.text for one in events if isinstance(one, rc.Token)) == TEXT
    kinds = [type(one) for one in events]
    assert kinds.index(rc.Token) > max(rank for rank, kind in enumerate(kinds) if kind is rc.Reasoning)


def test_an_answer_without_thoughts_is_whole(kb, monkeypatch):
    script(monkeypatch, kb.lm, f" {TEXT} a < b <thin ")
    answer = kb.chat([ASKED], sampling=LONG, enable_thinking=False)
    assert (answer.reasoning, answer.text, answer.usage.reasoning_tokens) == ("", f" {TEXT} a < b <thin ", 0)


@pytest.mark.parametrize("options", [{"enable_thinking": False}, {"reasoning_effort": "none"}])
def test_the_template_is_told(kb, lm, options, monkeypatch):
    plain = lm.tokenizer.apply_chat_template([ASKED], tokenize=False, add_generation_prompt=True)
    quiet = lm.tokenizer.apply_chat_template([ASKED], tokenize=False, add_generation_prompt=True, enable_thinking=False)
    assert rendered(lm, {}) == plain != quiet == rendered(lm, {"enable_thinking": False})
    script(monkeypatch, lm, *["Yes."] * 4)
    for call, more in ((kb.chat, {"context": "keep"}), (kb.chat, {})):
        assert call([ASKED], sampling=LONG, **options, **more).usage.prompt_tokens == len(quiet)
    own = kb.ask("Who?", 1, sampling=LONG).usage.prompt_tokens
    assert kb.ask("Who?", 1, sampling=LONG, **options).usage.prompt_tokens == own + len(quiet) - len(plain)


def test_effort_and_variables_reach_the_template(kb, lm, monkeypatch):
    monkeypatch.setattr(lm.tokenizer, "chat_template", TEMPLATES["channels"])
    script(monkeypatch, lm, "a", "b")
    lengths = [
        kb.chat([ASKED], sampling=LONG, **options).usage.prompt_tokens
        for options in ({"reasoning_effort": "high"}, {"chat_template_kwargs": {"reasoning_effort": "highest"}})
    ]
    assert lengths == [len(rendered(lm, {})) + 4, len(rendered(lm, {})) + 7]


def test_variables_of_a_template_are_text(lm, monkeypatch):
    monkeypatch.setattr(lm.tokenizer, "chat_template", TEMPLATES["channels"])
    ends, _ = Conversation(lm.tokenizer, [ASKED], Shown(variables={"reasoning_effort": "<|eos|>"})).as_written(None)
    assert lm.tokenizer.eos_token_id not in [*ends.prefix_ids, *ends.suffix_ids]


def test_a_budget_ends_the_thoughts(kb, form, monkeypatch):
    thinking = thinking_of(kb.lm.tokenizer)
    opened = thinking.open if form in ("asked", "channels") else ""
    script(monkeypatch, kb.lm, opened + "hm " * 40)
    answer = kb.chat([ASKED], sampling=Sampling(max_tokens=100), thinking_budget=9)
    assert answer.reasoning == ("hm " * 3).strip()
    assert answer.text.startswith("hm") or answer.text.startswith("m")  # the script goes on behind what was written
    assert answer.usage.reasoning_tokens < 9 + len(opened) + len(thinking.close) + 2


def test_thoughts_that_never_end_are_cut_by_the_length(kb, form, monkeypatch):
    opened = FORMS[0].open if form == "channels" else "<think>" if form == "asked" else ""
    script(monkeypatch, kb.lm, opened + "hm " * 90)
    answer = kb.chat([ASKED], sampling=Sampling(max_tokens=60))
    assert (answer.text, answer.finish_reason, answer.usage.completion_tokens) == ("", "length", 60)
    assert answer.reasoning.startswith("hm hm")
    assert answer.usage.reasoning_tokens >= 60 - len(opened)


def test_a_stop_string_ends_the_answer_and_no_thought(kb, form, monkeypatch):
    script(monkeypatch, kb.lm, SAID[form], SAID[form])
    answer = kb.chat([ASKED], sampling=Sampling(max_tokens=300, stop=("Falterona",)))
    assert (answer.reasoning, answer.text, answer.finish_reason) == (THOUGHT, "On ", "stop")
    assert kb.chat([ASKED], sampling=Sampling(max_tokens=300, stop=("\n\n",))).reasoning == THOUGHT


@pytest.mark.parametrize("form", ["begun", "brackets"], indirect=True)
def test_thoughts_are_free_and_the_answer_holds_to_its_form(kb, form, monkeypatch):
    thinking = thinking_of(kb.lm.tokenizer)
    script(monkeypatch, kb.lm, f'No JSON: "{thinking.close}{{"name":"Arno"}}')
    answer = kb.chat([ASKED], sampling=Sampling(max_tokens=300, json_schema=PLACE))
    jsonschema.validate(json.loads(answer.text), PLACE)
    assert answer.reasoning == 'No JSON: "'


def test_a_form_leaves_no_room_for_thoughts_that_were_not_begun(kb, monkeypatch):
    script(monkeypatch, kb.lm, "<think>Well")
    answer = kb.chat([ASKED], sampling=Sampling(max_tokens=300, json_schema=PLACE))
    jsonschema.validate(json.loads(answer.text), PLACE)
    assert answer.reasoning == ""


@pytest.mark.parametrize("form", ["begun"], indirect=True)
def test_thoughts_that_begin_in_a_learnt_passage_are_apart(open_kb, form, monkeypatch):
    kb = open_kb(store=rc.StoreConfig())
    script(monkeypatch, kb.lm, *[SAID[form]] * 3)
    for hits in (0, 0, 1):
        answer = kb.chat([ASKED], tools=[SEARCH], sampling=LONG)
        kb._questions.learner.wait()
        assert (answer.reasoning, answer.text, len(answer.hits)) == (THOUGHT, TEXT, hits)


@pytest.mark.parametrize("choice", ["auto", "required", "search"])
@pytest.mark.parametrize("form", ["begun", "brackets"], indirect=True)
def test_calls_hold_no_thoughts(kb, form, choice, monkeypatch):
    thinking = thinking_of(kb.lm.tokenizer)
    arguments = '{"name":"Arno"}'
    called = {
        "auto": f'<tool_call>{{"name": "search", "arguments": {arguments}}}</tool_call>',
        "required": f'[{{"name":"search","arguments":{arguments}}}]',
        "search": arguments,
    }[choice]
    thought = 'I call <tool_call>{"name": "none"}</tool_call> or [{"name":'
    script(monkeypatch, kb.lm, f"{thought}{thinking.close}{called}")
    answer = kb.chat([ASKED], tools=[SEARCH], tool_choice=choice, sampling=LONG)
    assert answer.reasoning == thought
    assert [(call.name, json.loads(call.arguments), call.error) for call in answer.tool_calls] == [
        ("search", {"name": "Arno"}, None)
    ]
    assert answer.text == ""


def test_earlier_thoughts_are_not_read_again(kb, lm, monkeypatch):
    script(monkeypatch, lm, SAID["asked"], "Yes.", "Yes.")
    first = kb.chat([ASKED], context="keep", sampling=LONG)
    later = [ASKED, {"role": "assistant", "content": first.text}, {"role": "user", "content": "Sure?"}]
    second = kb.chat(later, context="keep", sampling=LONG)
    written = lm.tokenizer.apply_chat_template(later, tokenize=False, add_generation_prompt=True)
    assert second.usage.prompt_tokens == len(written)
    assert second.usage.cached_tokens >= first.usage.prompt_tokens - 20
    assert second.text == kb.chat(later, sampling=LONG).text == "Yes."


def test_a_raw_prompt_is_written_as_it_stands(kb, monkeypatch):
    script(monkeypatch, kb.lm, SAID["asked"], SAID["asked"])
    for options in ({}, {"reasoning_effort": "none", "thinking_budget": 3}):
        answer = kb.complete("Where?", sampling=LONG, **options)
        assert (answer.text, answer.reasoning) == (SAID["asked"], "")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reasoning_effort": "huge"}, f"'huge' is unknown; choose one of {', '.join(EFFORTS)}"),
        ({"reasoning_effort": "none", "enable_thinking": True}, "contradict"),
        ({"reasoning_effort": "low", "enable_thinking": False}, "contradict"),
        ({"enable_thinking": "no"}, "give True, False or None"),
        ({"chat_template_kwargs": ["a"]}, "give a mapping"),
        ({"chat_template_kwargs": {"tools": [], "x": 1}}, "has tools, which ragcache gives the template itself"),
        ({"thinking_budget": -1}, "thinking_budget is -1"),
    ],
)
def test_what_cannot_be_told_is_named(kb, options, message):
    with pytest.raises(ConfigError, match=message):
        kb.chat([ASKED], **options)
    with pytest.raises(ConfigError, match=message):
        kb.ask("Where?", **options)


def test_a_model_that_does_not_think_is_not_asked_to(kb, lm, monkeypatch):
    monkeypatch.setattr(lm.tokenizer, "chat_template", TURN.replace("</think>", "~") + BEGIN.replace("BEGUN", "''"))
    assert thinking_of(lm.tokenizer) is None
    for options in ({"enable_thinking": True}, {"reasoning_effort": "low"}):
        with pytest.raises(ConfigError, match="does not have it think"):
            kb.chat([ASKED], **options)
    script(monkeypatch, lm, SAID["asked"])
    answer = kb.chat([ASKED], sampling=LONG, reasoning_effort="none", thinking_budget=3)
    assert (answer.text, answer.reasoning) == (SAID["asked"], "")
