"""Splits an answer, as it arrives, into text and calls of tools.

transformers' `ResponseParser` finds the regions of a format in a stream of text. What one says is read by `tools.py`:
a call that cannot be read is reported with its text.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Mapping, Sequence
from typing import Any

from transformers.utils.chat_parsing import ResponseParser

from ragcache.models.tools import UNREADABLE, ToolCall, ToolFormat, Written

ID_CHARACTERS = 9  # letters and digits: Mistral's templates take no other ids


class ToolParser:
    """Splits an answer, as it arrives, into text and calls.

    White space around calls is part of no text.

    most:  calls, of which later ones are dropped; None: all
    tools: functions in OpenAI's form, for the types of arguments
    """

    def __init__(self, format: ToolFormat, most: int | None = None, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        self._format = format
        self._parser = ResponseParser(format.response_template(), prefix="")
        self._space = ""
        self._most = most
        self._tools = tools
        self._calls = 0

    @property
    def is_full(self) -> bool:
        return self._calls == self._most

    def push(self, text: str) -> list[str | ToolCall]:
        """What this text completes."""
        return self._pieces(self._parser.feed(text))

    def finish(self) -> list[str | ToolCall]:
        """What is still held back. A call that was cut has an error, if it cannot be read."""
        pieces = self._pieces(self._parser.finalize()[1])
        return [*pieces, self._space] if self._space and not self._calls else pieces

    def _pieces(self, events: Sequence[Mapping[str, Any]]) -> list[str | ToolCall]:
        pieces: list[str | ToolCall] = []
        for event in events:
            name = event["field"]
            if event["type"] == "region_chunk" and (name == "text" or name in self._format.said):
                pieces += self._said(event["text"])
            elif event["type"] == "region_close" and name in self._format.calls:
                pieces += self._called(str(event["value"]), marked="open_pattern" not in self._format.calls[name])
        return pieces

    def _said(self, text: str) -> list[str]:
        text = self._space + text
        kept = text.rstrip()
        self._space = text[len(kept) :]
        return [kept] if kept else []

    def _called(self, text: str, *, marked: bool) -> Sequence[str | ToolCall]:
        if not marked and self._format.bare is not None and not self._format.bare.match(text):
            return self._said(text)
        calls = read_calls(self._format, text, self._tools)
        calls = calls if self._most is None else calls[: self._most - self._calls]
        self._calls += len(calls)
        self._space = ""
        return calls


def read_calls(format: ToolFormat, text: str, tools: Sequence[Mapping[str, Any]] = ()) -> list[ToolCall]:
    """The calls of a text; one with an error, and all of the text, where it cannot be read."""
    try:
        found = format.read(text)
        return [ToolCall(new_id(), *(typed(one, tools) if format.untyped else one)) for one in found]
    except UNREADABLE as error:
        return [ToolCall(new_id(), format.name or _name_in(text), text.strip(), f"the call cannot be read: {error}")]


def _name_in(text: str) -> str:
    """The name that a broken call begins with; "" if none can be told."""
    named = re.search(r'"name"\s*:\s*"([^"]+)"', text)
    named = named or re.match(r"[\s\[<]*(?:call:|function=)?([A-Za-z_][\w.-]*)", text)
    return named[1] if named else ""


def new_id() -> str:
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(ID_CHARACTERS))


def typed(call: Written, tools: Sequence[Mapping[str, Any]]) -> Written:
    """The call with its arguments, all text, read as JSON where the tool's schema wants no text."""
    functions = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
    wanted = functions.get(call.name, {}).get("properties")
    schemas = wanted if isinstance(wanted, dict) else {}
    arguments = {name: _typed(text, schemas.get(name)) for name, text in json.loads(call.arguments).items()}
    return Written(call.name, json.dumps(arguments, ensure_ascii=False))


def _typed(text: str, schema: Any) -> Any:
    kinds = _kinds(schema)
    if not kinds or "string" in kinds:
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text  # the tool says what is wrong with it


def _kinds(schema: Any) -> set[str]:
    """The types that a schema allows; empty where it does not say."""
    if not isinstance(schema, dict):
        return set()
    kinds = schema.get("type")
    named = [kinds] if isinstance(kinds, str) else kinds if isinstance(kinds, list) else []
    choices = [*schema.get("anyOf", ()), *schema.get("oneOf", ())]
    return {str(kind) for kind in named}.union(*map(_kinds, choices))
