"""Calls of tools: the formats that chat templates teach their models, and a reader for each."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from ragcache.errors import ConfigError, check_choice
from ragcache.models.thoughts import Thinking

UNREADABLE = (ValueError, SyntaxError, RecursionError, MemoryError)  # the errors of json and ast for unreadable text
START = "\ue000"
TEXT = {"content": "text", "content_args": {"strip": False}}


@dataclass(frozen=True)
class ToolCall:
    """A tool call that a model requests.

    arguments: a JSON object; if there is an error, the text that the model wrote
    error:     why the call cannot be executed; None: it can
    """

    id: str
    name: str
    arguments: str
    error: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the call in OpenAI's form."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class Written(NamedTuple):
    """A parsed call: its name, and its arguments as a JSON object."""

    name: str
    arguments: str


Read = Callable[[str], list[Written]]


@dataclass(frozen=True)
class ToolFormat:
    """The way in which a model writes calls.

    read:    returns the calls that a region's text states; raises one of UNREADABLE
    calls:   regions of calls, as a response template of transformers names them
    said:    regions whose text is part of the answer, besides text outside all regions
    thoughts: regions whose text is not part of the answer
    markers: control tokens that mark the regions
    signs:   groups of words: a chat template that has all words of a group, and no word of `unlike`, teaches the format
    untyped: arguments are written as text, whatever their type
    bare:    regions without a marker are calls only if this matches
    name:    the function's name, for a format that writes only its arguments
    """

    read: Read
    calls: Mapping[str, Mapping[str, Any]]
    said: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    thoughts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    markers: tuple[str, ...] = ()
    signs: tuple[tuple[str, ...], ...] = ()
    unlike: tuple[str, ...] = ()
    untyped: bool = False
    bare: re.Pattern[str] | None = None
    name: str = ""

    def is_taught_by(self, template: str) -> bool:
        taught = any(all(sign in template for sign in group) for group in self.signs)
        return taught and not any(sign in template for sign in self.unlike)

    def response_template(self) -> dict[str, Any]:
        regions = {**self.calls, **self.said, **self.thoughts}
        fields = {name: {**TEXT, "repeats": True, **ends} for name, ends in regions.items()}
        return {"start_anchor": START, "fields": {"text": TEXT, **fields}}


class Thought(str):
    """Text of the reasoning that a model writes before it answers."""


def answer_format(
    tools: ToolFormat | None, thinking: Thinking | None, markers: tuple[str, ...], *, is_open: bool
) -> ToolFormat | None:
    """Return the format of an answer with tools, thoughts or both; None if the answer is only text.

    markers: special tokens of the thoughts. is_open: whether the prompt has begun them
    """
    if thinking is None:
        return tools
    if tools is None:
        plain = FORMATS["harmony"] if thinking.answer else ToolFormat(read_json, {})
        tools = replace(plain, calls={})
    thoughts = tools.thoughts or {"thought": {"open": thinking.open, "close": thinking.close}}
    start = f"(?<={re.escape(thinking.close + thinking.answer)})"
    start = start if is_open else rf"(?:\A|{start})"
    calls = {
        name: {key: ends.replace(r"\A", start) if key == "open_pattern" else ends for key, ends in region.items()}
        for name, region in tools.calls.items()
    }
    return replace(tools, calls=calls, thoughts=thoughts, markers=(*tools.markers, *markers))


def _arguments(found: Any) -> str:
    if isinstance(found, str):  # JSON within JSON
        found = json.loads(found)
    if not isinstance(found, dict):
        raise ValueError(f"the arguments are no JSON object: {json.dumps(found)[:80]}")
    return json.dumps(found, ensure_ascii=False)


def _written(found: Any) -> Written:
    """Convert a JSON value to a call. Raises ValueError if it is not a call."""
    function = found.get("function", found) if isinstance(found, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(f"a call is an object with a name and arguments, not {json.dumps(found)[:80]}")
    return Written(function["name"], _arguments(function.get("arguments", function.get("parameters", {}))))


def read_json(text: str) -> list[Written]:
    """Read objects with a name and arguments, in sequence or in lists."""
    decoder, found, at = json.JSONDecoder(), [], 0
    while (at := _behind(r"[\s;,]*", text, at)) < len(text):
        value, at = decoder.raw_decode(text, at)
        found += [_written(call) for call in (value if isinstance(value, list) else [value])]
    return found


def read_mistral(text: str) -> list[Written]:
    """Read a list of objects, or a name and its arguments."""
    named = re.match(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\])?\s*(?=\{)", text)
    return read_json(text) if named is None else [Written(named[1], _arguments(json.loads(text[named.end() :])))]


def read_harmony(text: str) -> list[Written]:
    """Read a name, a header and arguments."""
    name, found, arguments = text.partition("<|message|>")
    if not found:
        raise ValueError("the call ends before its arguments")
    return [Written(re.split(r"\s|<\|", name, maxsplit=1)[0], _arguments(json.loads(arguments)))]


def read_gemma(text: str) -> list[Written]:
    """Read a name and arguments, whose keys have no quotes and whose strings have special delimiters."""
    from transformers.utils.chat_parsing.content_parsers import parse_content

    named = re.match(r"\s*call:([\w.-]+)\s*(?=\{)", text)
    if named is None:
        raise ValueError("a call is call:name{arguments}")
    marks = [['<|"|>', '<|"|>'], ["<escape>", "<escape>"]]
    found = parse_content(text[named.end() :], "json", {"unquoted_keys": True, "string_delims": marks})
    return [Written(named[1], _arguments(found))]


def read_python(text: str) -> list[Written]:
    """Read calls in Python with named arguments that are literals: a call per line, or in a list."""
    found = []
    for line in ast.parse(text.strip()).body:
        value = _Literals().visit(line.value) if isinstance(line, ast.Expr) else line
        found += [_python_call(node) for node in (value.elts if isinstance(value, ast.List) else [value])]
    return found


class _Literals(ast.NodeTransformer):
    """A transformer that replaces JSON's true, false and null by Python's values."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        named = {"true": True, "false": False, "null": None}
        return ast.Constant(named[node.id]) if node.id in named else node


def _python_call(node: ast.AST) -> Written:
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "print" and len(node.args) == 1:
        node = node.args[0]
    if not isinstance(node, ast.Call) or node.args or any(keyword.arg is None for keyword in node.keywords):
        raise ValueError(f"{ast.unparse(node)[:80]} is no call with named arguments")
    arguments = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in node.keywords}
    return Written(ast.unparse(node.func), json.dumps(arguments, ensure_ascii=False))


def read_xml(text: str) -> list[Written]:
    """Read a function element with an element for each argument, whose values are text."""
    function = re.fullmatch(r"(?s)\s*<function=([\w.-]+)>(.*)</function>\s*", text)
    if function is None:
        raise ValueError("a call is <function=name> with its parameters </function>")
    found = re.findall(r"(?s)<parameter=([\w.-]+)>\n?(.*?)\n?</parameter>", function[2])
    return [Written(function[1], json.dumps(dict(found), ensure_ascii=False))]


def _behind(expression: str, text: str, at: int) -> int:
    match = re.compile(expression).match(text, at)
    return at if match is None else match.end()


HARMONY = r"(?:<\|start\|>assistant)?"
FORMATS = {
    "harmony": ToolFormat(
        read_harmony,
        {"call": {"open_pattern": HARMONY + r"(?:<\|channel\|>commentary)?\s*to=functions\.", "close": "<|call|>"}},
        said={
            "said": {
                "open_pattern": HARMONY + r"<\|channel\|>(?:final|commentary)<\|message\|>",
                "close": ["<|end|>", "<|return|>"],
            }
        },
        thoughts={"thought": {"open_pattern": HARMONY + r"<\|channel\|>analysis<\|message\|>", "close": "<|end|>"}},
        markers=("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|call|>", "<|end|>", "<|return|>"),
        signs=(("<|channel|>", "commentary"),),
    ),
    "gemma": ToolFormat(
        read_gemma,
        {"call": {"open": ["<|tool_call>", "<start_function_call>"], "close": ["<tool_call|>", "<end_function_call>"]}},
        markers=("<|tool_call>", "<tool_call|>", '<|"|>', "<start_function_call>", "<end_function_call>", "<escape>"),
        signs=(("<|tool_call>",), ("<start_function_call>",)),
    ),
    "mistral": ToolFormat(
        read_mistral,
        {"call": {"open": "[TOOL_CALLS]", "close_pattern": r"(?=\[TOOL_CALLS\])"}},
        markers=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
        signs=(("[TOOL_CALLS]",),),
    ),
    "hermes": ToolFormat(
        read_json,
        {"call": {"open": "<tool_call>", "close": "</tool_call>"}},
        markers=("<tool_call>", "</tool_call>"),
        signs=(("<tool_call>",),),
        unlike=("<function=", "<arg_key>"),
    ),
    "xml": ToolFormat(
        read_xml,
        {"call": {"open": "<tool_call>", "close": "</tool_call>"}},
        markers=("<tool_call>", "</tool_call>"),
        signs=(("<tool_call>", "<function="),),
        untyped=True,
    ),
    "llama3": ToolFormat(
        read_json,
        {"call": {"open": "<|python_tag|>"}, "bare": {"open_pattern": r"\A\s*(?=\{)"}},
        markers=("<|python_tag|>",),
        signs=(("<|python_tag|>",), ('"name": function name', '"parameters"')),
        bare=re.compile(r'(?s)\s*\{.*"name"\s*:.*"(?:parameters|arguments)"\s*:'),
    ),
    "pythonic": ToolFormat(
        read_python,
        {
            "call": {"open": "```tool_code", "close": "```"},
            "list": {"open_pattern": r"\A\s*(?=\[\s*[A-Za-z_][\w.]*\()"},
        },
        signs=(("```tool_code",), ("[func_name1(",)),
    ),
}
"""Formats by name, the most particular signs first."""


def format_of(template: str, name: str | None = None) -> ToolFormat:
    """Return the format of this name; None: the format that the chat template teaches.

    Raises ConfigError naming the choices.
    """
    if name is not None:
        check_choice("tool_format", name, FORMATS)
        return FORMATS[name]
    taught = next((format for format in FORMATS.values() if format.is_taught_by(template)), None)
    if taught is None:
        raise ConfigError(
            "the model's chat template names no format of tool calls that is known here; pass tool_format="
            f"{' or '.join(map(repr, FORMATS))}, or tool_choice='required', which holds the answer to JSON"
        )
    return taught
