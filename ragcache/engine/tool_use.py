"""Tools of a call: how they are shown to the model, how its calls are read, and the form that an answer must have."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from ragcache.engine.options import ChatOptions
from ragcache.errors import ConfigError
from ragcache.models.sampler import Sampling
from ragcache.models.tool_calls import ToolFormat, Written, format_of, read_json

EXAMPLE = '{"type": "function", "function": {"name": "search", "parameters": {"type": "object", "properties": {}}}}'
CHOICES = ("auto", "none", "required")
WHOLE = {"call": {"open_pattern": r"\A"}}


@dataclass(frozen=True)
class ToolUse:
    """The tools of a request.

    shown:  the tools, in OpenAI's form
    format: how the model writes calls
    schema: JSON schema that the answer must follow; None: the answer is free
    most:   the most calls of an answer; None: any number
    """

    shown: tuple[Mapping[str, Any], ...]
    format: ToolFormat
    schema: str | None = None
    most: int | None = None

    def sampling(self, sampling: Sampling) -> Sampling:
        """Return the sampling that produces calls. Raises ConfigError if the answer must already have another form."""
        if sampling.grammar() is not None:
            raise ConfigError(
                "tools and json_schema, regex or choices exclude each other: an answer of that form could be no call; "
                "leave one out, or pass tool_choice='none'",
                "tools",
            )
        return sampling if self.schema is None else replace(sampling, json_schema=self.schema)


def tool_use(options: ChatOptions, tokenizer: PreTrainedTokenizerBase) -> ToolUse | None:
    """Return the tools that the model may call, or None if it may call none. Raises ConfigError."""
    tools, choice = _tools(options.get("tools") or ()), _choice(options.get("tool_choice"))
    named = options.get("tool_format")
    if not tools and choice in ("auto", "none"):
        return None
    names = [tool["function"]["name"] for tool in tools]
    if choice not in (*CHOICES, *names):
        raise ConfigError(
            f"tool_choice {choice!r} is none of {', '.join(CHOICES)}, nor a tool: {', '.join(names)}", "tool_choice"
        )
    if choice == "none":
        return None
    if not tools:
        raise ConfigError(f"tool_choice {choice!r} needs tools; pass at least one", "tools")
    most = None if options.get("parallel_tool_calls", True) is not False else 1
    template = _template(tokenizer, tools)
    if choice == "auto":
        return ToolUse(tools, format_of(template, named), None, most)
    if choice == "required":
        return ToolUse(tools, ToolFormat(read_json, WHOLE), _list_schema(tools, most), most)
    (parameters,) = (tool["function"]["parameters"] for tool in tools if tool["function"]["name"] == choice)
    schema = json.dumps(_closed(parameters))
    return ToolUse(tools, ToolFormat(partial(_arguments_alone, choice), WHOLE, name=choice), schema, 1)


def _tools(value: Any) -> tuple[Mapping[str, Any], ...]:
    try:
        tools = json.loads(json.dumps(list(value)))  # checks that it is JSON, and copies it
        functions = [tool["function"] for tool in tools if tool["type"] == "function"]
        fine = len(functions) == len(tools) and all(isinstance(function["name"], str) for function in functions)
        fine = fine and all(isinstance(function.get("parameters") or {}, dict) for function in functions)
    except (TypeError, ValueError, KeyError, AttributeError, RecursionError) as error:
        raise ConfigError(f"tools are a list of objects like {EXAMPLE}", "tools") from error
    if not fine:
        raise ConfigError(f"tools are a list of objects like {EXAMPLE}", "tools")
    names = [tool["function"]["name"] for tool in tools]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(
            f"two tools are named {twice[0]!r}; a call could be to either, so give them names of their own", "tools"
        )
    return tuple({"type": "function", "function": _filled(function)} for function in functions)


def _filled(function: Mapping[str, Any]) -> dict[str, Any]:
    """Return the function with all fields that chat templates look for."""
    fields = {name: value for name, value in function.items() if value is not None}
    return {"name": "", "description": "", "parameters": {"type": "object", "properties": {}}, **fields}


def _choice(choice: Any) -> str:
    """Return the choice as a name. Takes OpenAI's form too: {"type": "function", "function": {"name": ...}}."""
    if isinstance(choice, Mapping):
        function = choice.get("function")
        choice = function.get("name") if isinstance(function, Mapping) else choice
    if choice is not None and not isinstance(choice, str):
        raise ConfigError(
            f"tool_choice {choice!r:.80} is none of {', '.join(CHOICES)}, nor the name of a tool", "tool_choice"
        )
    return choice or "auto"


def _template(tokenizer: PreTrainedTokenizerBase, tools: Sequence[Mapping[str, Any]]) -> str:
    """Return the chat template for prompts with tools. Raises ConfigError if it would not show them."""
    written = tokenizer.get_chat_template(tools=list(tools)) if tokenizer.chat_template is not None else ""
    if "tools" not in written:
        raise ConfigError(
            "the model's chat template shows no tools, so the model would not know of them; choose a model whose "
            "template does (Qwen3, Llama 3.1, Mistral, GPT-OSS), or give its tokenizer such a chat_template",
            "tools",
        )
    return str(written)


def _list_schema(tools: Sequence[Mapping[str, Any]], most: int | None) -> str:
    """Return the JSON schema of a list of calls, of at least one and at most `most` (None: any number).

    Raises ConfigError if two tools define the same name otherwise.
    """
    calls: list[Any] = []
    definitions: dict[str, Any] = {}
    for tool in tools:
        parameters = _closed(tool["function"]["parameters"])
        for name, definition in parameters.pop("$defs", {}).items():  # references point to the top level
            if definitions.setdefault(name, definition) != definition:
                raise ConfigError(
                    f"two tools define {name!r} in another way; tool_choice='required' needs one meaning", "tools"
                )
        properties = {"name": {"const": tool["function"]["name"]}, "arguments": parameters}
        calls.append(_closed({"type": "object", "properties": properties, "required": list(properties)}))
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    return json.dumps(schema | ({} if most is None else {"maxItems": most}) | {"$defs": definitions})


def _closed(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema, closed to arguments that it does not name unless it says otherwise."""
    return {"additionalProperties": False, **parameters}


def _arguments_alone(name: str, text: str) -> list[Written]:
    json.loads(text)
    return [Written(name, text)]
