"""A parser that splits an answer, as it arrives, into text and calls of tools.

transformers' `ResponseParser` finds the regions of a format in a stream of text. `tool_calls.py` parses the text of a
region; a call that cannot be read is reported with its text.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass
from typing import Any

from transformers.utils.chat_parsing import ResponseParser

from ragcache.models.tool_calls import START, UNREADABLE, Thought, ToolCall, ToolFormat, Written

ID_CHARACTERS = 9  # letters and digits: Mistral's templates take no other ids


Parsed = str | Thought | ToolCall


@dataclass(eq=False, repr=False)
class ToolParser:
    """A parser that splits an answer, as it arrives, into text, thoughts and calls.

    White space around thoughts and calls is left out.

    is_thinking: whether the text that comes next is a thought
    most:   number of calls after which further ones are dropped; None: all are kept
    tools:  functions in OpenAI's form, for the types of arguments
    opened: the opening of the thoughts that the prompt has begun
    """

    _format: ToolFormat
    _most: int | None = None
    _tools: Sequence[Mapping[str, Any]] = ()
    opened: InitVar[str] = ""

    def __post_init__(self, opened: str) -> None:
        self._parser = ResponseParser(self._format.response_template(), prefix=START + opened if opened else "")
        self.is_thinking = bool(opened)
        self._begins = bool(opened)  # nothing but white space was written since a region opened or closed
        self._space, self._calls = "", 0

    @property
    def is_full(self) -> bool:
        return self._calls == self._most

    def push(self, text: str) -> list[Parsed]:
        """Return the pieces that this text completes."""
        return self._pieces(self._parser.feed(text))

    def finish(self) -> list[Parsed]:
        """Return the pieces still held back. A call that was cut off has an error, if it cannot be read."""
        pieces = self._pieces(self._parser.finalize()[1])
        return [*pieces, self._space] if self._space and not self._calls else pieces

    def _pieces(self, events: Sequence[Mapping[str, Any]]) -> list[Parsed]:
        pieces: list[Parsed] = []
        for event in events:
            name = event["field"]
            if name in self._format.thoughts:
                pieces += self._thought(event)
                continue
            if event["type"] == "region_chunk" and (name == "text" or name in self._format.said):
                pieces += self._said(event["text"])
            elif event["type"] == "region_close" and name in self._format.calls:
                pieces += self._called(str(event["value"]), marked="open_pattern" not in self._format.calls[name])
        return pieces

    def _thought(self, event: Mapping[str, Any]) -> list[Parsed]:
        if event["type"] != "region_chunk":
            self.is_thinking = event["type"] == "region_open"
            self._begins, self._space = True, ""
            return []
        return [Thought(piece) for piece in self._said(event["text"])]

    def _said(self, text: str) -> list[str]:
        text = self._space + text
        if self._begins:
            text = text.lstrip()
            self._begins = not text
        kept = text.rstrip()
        self._space = text[len(kept) :]
        return [kept] if kept else []

    def _called(self, text: str, *, marked: bool) -> Sequence[Parsed]:
        if not marked and self._format.bare is not None and not self._format.bare.match(text):
            return self._said(text)
        format = self._format
        try:
            found = format.read(text)
            calls = [ToolCall(new_id(), *(typed(call, self._tools) if format.untyped else call)) for call in found]
        except UNREADABLE as error:
            name = format.name or _name_in(text)
            calls = [ToolCall(new_id(), name, text.strip(), f"the call cannot be read: {error}")]
        calls = calls if self._most is None else calls[: self._most - self._calls]
        self._calls += len(calls)
        self._space = ""
        return calls


def _name_in(text: str) -> str:
    """Return the name that a broken call begins with; "" if none is found."""
    named = re.search(r'"name"\s*:\s*"([^"]+)"', text)
    named = named or re.match(r"[\s\[<]*(?:call:|function=)?([A-Za-z_][\w.-]*)", text)
    return named[1] if named else ""


def new_id() -> str:
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(ID_CHARACTERS))


def typed(call: Written, tools: Sequence[Mapping[str, Any]]) -> Written:
    """Convert a call's arguments, all text, to JSON values, except those that the tool's schema declares as text."""
    functions = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
    properties = functions.get(call.name, {}).get("properties")
    schemas = properties if isinstance(properties, dict) else {}
    arguments = {name: _typed(text, schemas.get(name)) for name, text in json.loads(call.arguments).items()}
    return Written(call.name, json.dumps(arguments, ensure_ascii=False))


def _typed(text: str, schema: Any) -> Any:
    kinds = _kinds(schema)
    if not kinds or "string" in kinds:
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text  # the tool reports the error


def _kinds(schema: Any) -> set[str]:
    """Return the types that a schema allows; an empty set if it does not state any."""
    if not isinstance(schema, dict):
        return set()
    kinds = schema.get("type")
    named = [kinds] if isinstance(kinds, str) else kinds if isinstance(kinds, list) else []
    choices = [*schema.get("anyOf", ()), *schema.get("oneOf", ())]
    return {str(kind) for kind in named}.union(*map(_kinds, choices))
