"""Answers of well-known models, as they write calls, split into text and calls."""

import json

import pytest
from templates import FAMILIES, TOOL_TEMPLATES, template_tokenizer

from ragcache.errors import ConfigError
from ragcache.models.generate import Detokenizer
from ragcache.models.tool_calls import FORMATS, Thought, format_of
from ragcache.models.tool_parser import ToolParser

F, G = ("f", {"a": 1}), ("g", {})
XML = "<tool_call>\n<function=f>\n<parameter=a>\n%s\n</parameter>\n</function>\n</tool_call>"
TYPED = {
    "f": {"a": {"type": "integer"}, "b": {"anyOf": [{"type": "string"}, {"type": "null"}]}, "c": {"type": ["array"]}},
    "g": {},
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}
    for name, properties in TYPED.items()
]
CALLS = {
    "hermes": [
        (
            'I look.\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n<tool_call>\n'
            '{"name": "g", "arguments": {}}\n</tool_call>',
            "I look.",
            [F, G],
        ),
        ('<tool_call>{"arguments": "{\\"a\\": 1}", "name": "f"}</tool_call>So.', "So.", [F]),
        ("1 < 2, <tool> and </tool_call> \n", "1 < 2, <tool> and </tool_call> \n", []),
    ],
    "llama3": [
        ('{"name": "f", "parameters": {"a": 1}}', "", [F]),
        ('<|python_tag|>{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}', "", [F, G]),
        ('{"name": "Ada", "age": 3}', '{"name": "Ada", "age": 3}', []),
        ('So: {"name": "f", "parameters": {}}', 'So: {"name": "f", "parameters": {}}', []),
    ],
    "mistral": [
        ('[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]', "", [F, G]),
        ('Wait.[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[CALL_ID]x1[ARGS]{}', "Wait.", [F, G]),
        ("[TOOLS] [1]", "[TOOLS] [1]", []),
    ],
    "pythonic": [
        ("[f(a=1), g()]", "", [F, G]),
        ("Sure:\n```tool_code\nprint(f(a=1))\ng()\n```\n", "Sure:", [F, G]),
        ("[f(a=[true, {'b': None}])]", "", [("f", {"a": [True, {"b": None}]})]),
        ("[f](http://f) [1, 2]", "[f](http://f) [1, 2]", []),
    ],
    "harmony": [
        (
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.f "
            '<|constrain|>json<|message|>{"a": 1}<|call|>',
            "",
            [F],
        ),
        (
            "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant to=functions.g<|channel|>commentary json"
            "<|message|>{}",
            "I look.",
            [G],
        ),
        ("<|channel|>final<|message|>It is one.", "It is one.", []),
    ],
    "xml": [
        (f"Wait.\n{XML % 1}\n<tool_call>\n<function=g>\n</function>\n</tool_call>", "Wait.", [F, G]),
        (XML % "many", "", [("f", {"a": "many"})]),
        (
            "<tool_call><function=f><parameter=b>\n1\n2\n</parameter><parameter=c>[1]</parameter></function></tool_call>",
            "",
            [("f", {"b": "1\n2", "c": [1]})],
        ),
    ],
    "gemma": [
        ("<|tool_call>call:f{a:1}<tool_call|><|tool_call>call:g{}<tool_call|>", "", [F, G]),
        ('So <|tool_call>call:f{a:<|"|>x "y", {z: 1}<|"|>}<tool_call|>', "So", [("f", {"a": 'x "y", {z: 1}'})]),
        ("<start_function_call>call:f{a:<escape>b<escape>}<end_function_call>", "", [("f", {"a": "b"})]),
    ],
}
BROKEN = {
    "xml": "<tool_call>\n<function=f>\n<parameter=a>\n1\n",
    "hermes": '<tool_call>{"name": "f", "arguments": {"a": }}</tool_call>',
    "llama3": '{"name": "f", "parameters": {"a": ',
    "mistral": '[TOOL_CALLS][{"name": "f", "arguments": [1]}]',
    "pythonic": "[f(a=open('x'))]",
    "harmony": "<|channel|>commentary to=functions.f <|message|>{oh}<|call|>",
    "gemma": "<|tool_call>call:f{a:b c}<tool_call|>",
}
ALL = [(name, *case) for name, cases in CALLS.items() for case in cases]


def split(name, pieces, most=None):
    parser = ToolParser(FORMATS[name], most, TOOLS)
    found = [one for piece in pieces for one in parser.push(piece)] + parser.finish()
    calls = [one for one in found if not isinstance(one, str)]
    return "".join(one for one in found if isinstance(one, str) and not isinstance(one, Thought)), calls


@pytest.mark.parametrize(("name", "answer", "text", "calls"), ALL)
def test_text_and_calls_however_the_answer_arrives(name, answer, text, calls):
    for size in (1, 2, 7, len(answer)):
        said, made = split(name, [answer[at : at + size] for at in range(0, len(answer), size)])
        assert said == text
        assert [(call.name, json.loads(call.arguments), call.error) for call in made] == [(*one, None) for one in calls]
        assert all(len(call.id) == 9 and call.id.isalnum() for call in made)
        assert len({call.id for call in made}) == len(made)


@pytest.mark.parametrize("name", BROKEN)
def test_a_call_that_cannot_be_read_keeps_its_text(name):
    said, (call,) = split(name, BROKEN[name])
    assert (said, call.name) == ("", "f")
    assert call.arguments in BROKEN[name]
    assert "a" in call.arguments or "oh" in call.arguments
    assert "cannot be read" in call.error


def test_the_first_of_several_calls():
    _, calls = split("hermes", CALLS["hermes"][0][0], most=1)
    assert [call.name for call in calls] == ["f"]


@pytest.mark.parametrize("name", TOOL_TEMPLATES)
def test_a_template_tells_its_format(name):
    assert format_of(TOOL_TEMPLATES[name]) is FORMATS[name]
    assert format_of(TOOL_TEMPLATES[name], "hermes") is FORMATS["hermes"]


def test_unknown_formats_are_refused_by_name():
    with pytest.raises(ConfigError, match="tool_format='harmony' or"):
        format_of("{{ tools }} <tool_call> <arg_key>")
    with pytest.raises(ConfigError, match="'strange' is unknown; choose one of harmony"):
        format_of("", "strange")


def test_markers_are_kept_where_special_tokens_are_left_out():
    tokenizer = template_tokenizer("mistral")
    tokenizer.add_special_tokens({"additional_special_tokens": [*FAMILIES["mistral"][1][2:], "[TOOL_CALLS]"]})
    ids = tokenizer('[INST] a[TOOL_CALLS]f[ARGS]{"b": 1}</s>', add_special_tokens=False)["input_ids"]
    for markers, text in (((), ' af[ARGS]{"b": 1}'), (FORMATS["mistral"].markers, ' a[TOOL_CALLS]f[ARGS]{"b": 1}')):
        stream = Detokenizer(tokenizer, (), markers)
        assert "".join([*(stream.push(id) for id in ids), stream.finish()]).replace("  ", " ") == text
