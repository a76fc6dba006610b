"""Converts messages that contain passages into prompt ends and passages."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from ragcache.engine.passages import Passage
from ragcache.errors import PromptError, check_type
from ragcache.models.tool_calls import ToolCall
from ragcache.prompt import (
    CONTEXT_MARK,
    END_MARK,
    MARK,
    NOTHING_SHOWN,
    TURN_MARK,
    PromptEnds,
    PromptFormat,
    Shown,
    all_as_text,
    as_text,
    conversation_ends,
    conversation_pieces,
    encode_text,
    system_turn,
    text_ends,
)
from ragcache.retrieval.retriever import Hit

ROLES = ("system", "user", "assistant", "tool")
WAY_OUT = 'give a list such as [{"role": "user", "content": "..."}]; `ask` takes a lone question'
Given = Passage | Hit
Part = str | Given


@dataclass(frozen=True)
class Turn:
    """A message of a conversation.

    parts:   its texts and passages, in order
    calls:   functions that an assistant called
    call_id, name: the call, and the function's name, that a tool's message answers
    """

    role: str
    parts: tuple[Part, ...]
    calls: tuple[ToolCall, ...] = ()
    call_id: str = ""
    name: str = ""

    @property
    def has_passages(self) -> bool:
        return any(not isinstance(part, str) for part in self.parts)

    @property
    def is_answer(self) -> bool:
        """Return whether this is an assistant's message without calls: a call waits for its result."""
        return self.role == "assistant" and not self.calls

    @property
    def has_slot(self) -> bool:
        """Return whether this turn has a place for passages, even if it holds none."""
        return self.role == "user" or (self.role == "tool" and self.has_passages)

    @property
    def text(self) -> str:
        """Return the whole turn as text, passages included."""
        return "".join(_text(part) for part in self.parts)

    @property
    def plain(self) -> str:
        """Return the turn's text without its passages, which may be left out if they do not fit."""
        return "".join(part for part in self.parts if isinstance(part, str))

    @property
    def said(self) -> str:
        """Return the whole turn with its calls, by which a conversation is recognised."""
        return said(self.text, self.calls)

    def message(self, tokenizer: PreTrainedTokenizerBase, content: str) -> dict[str, Any]:
        """Return this turn's message for the chat template, with `content` as its content."""
        message: dict[str, Any] = {"role": self.role, "content": content}
        if self.calls:
            message["tool_calls"] = all_as_text(tokenizer, [_shown(call) for call in self.calls])
        if self.role == "tool":
            message |= all_as_text(tokenizer, {"tool_call_id": self.call_id, "name": self.name})
        return message


def said(text: str, calls: Sequence[ToolCall]) -> str:
    """Return an answer's text and calls in a form that does not depend on the calls' white space and ids."""
    return text + "".join(f"\n{json.dumps(_shown(call)['function'], sort_keys=True)}" for call in calls)


class Slot(NamedTuple):
    """The place of a turn's passages in a rendered conversation. turn: the turn's rank"""

    turn: int


class Said(NamedTuple):
    """The place of an assistant's whole answer in a rendered conversation. turn: the turn's rank"""

    turn: int


class Conversation:
    """Turns of a chat; see `RagCache.stream_chat`. A last assistant message without text is ignored.

    turns: all of them. read: those that the model reads, each with its rank
    shown: the chat template's inputs beside the turns

    Raises ConfigError if `messages` is not a list, PromptError that names the message that cannot be read.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]], shown: Shown = NOTHING_SHOWN
    ) -> None:
        check_type("messages", messages, (list, tuple), WAY_OUT)
        self._tokenizer = tokenizer
        self.turns = _named([_turn(rank, message) for rank, message in enumerate(messages)])
        self._gone: frozenset[int] = frozenset()
        self._shown = shown
        if self.turns and self.turns[-1].is_answer and not self.continues:
            self.turns.pop()
        self.read = list(enumerate(self.turns))
        users = [turn for turn in self.turns if turn.role == "user"]
        if not users:
            raise PromptError("there is no user message; end the conversation with a question")
        if not users[-1].text.strip():
            raise PromptError("the question is empty; ask something")

    @property
    def question(self) -> str:
        """Return the text of the last user message."""
        return next(turn.text for turn in reversed(self.turns) if turn.role == "user").strip()

    @property
    def asking(self) -> int:
        """Return the rank of the turn with the newest passages: the last user message, or a later tool message with
        any."""
        return max(rank for rank, turn in self.read if turn.has_slot)

    @property
    def standing(self) -> list[int]:
        """Return the ranks of system messages with passages, which belong to every later question."""
        return [rank for rank, turn in self.read if turn.role == "system" and turn.has_passages and rank < self.asking]

    @property
    def continues(self) -> bool:
        """Return whether the answer continues the last message, an assistant's."""
        return self.turns[-1].is_answer and bool(self.turns[-1].text.strip())

    @property
    def has_passages(self) -> bool:
        return any(turn.has_passages for turn in self.turns)

    @property
    def old(self) -> list[list[int]]:
        """Return the ranks of turns that may be left out, oldest first, in groups that only make sense together.

        Before the last question, a group is a question with its answers. After the last question, a group is an
        assistant's tool calls with their results; the newest such group must stay and is not returned.
        """
        last = max(rank for rank, turn in enumerate(self.turns) if turn.role == "user")
        groups: list[list[int]] = []
        for rank, turn in enumerate(self.turns):
            if turn.role == "system" or rank == last or rank in self._gone:
                continue
            if not groups or turn.role == ("user" if rank < last else "assistant") or groups[-1][0] < last < rank:
                groups.append([])
            groups[-1].append(rank)
        return groups[:-1] if groups and groups[-1][0] > last else groups

    def without(self, groups: Sequence[Sequence[int]]) -> Conversation:
        """Return this conversation, read without these turns."""
        shorter = copy(self)
        shorter._gone = self._gone.union(*groups)
        shorter.read = [(rank, turn) for rank, turn in self.read if rank not in shorter._gone]
        return shorter

    @property
    def num_gone(self) -> int:
        """Return how many turns are left out."""
        return len(self._gone)

    @property
    def given_text(self) -> list[str]:
        """Return the text that the caller wrote, without passages given as such and without answers."""
        turns = [turn for _, turn in self.read if turn.role != "assistant"]
        return [part for turn in turns for part in turn.parts if isinstance(part, str)]

    def as_written(self, system: str | None) -> tuple[PromptEnds, list[Given]]:
        """Return ends around the passages of the last turn that has any, and these passages; earlier passages are plain
        text.

        system: text of a system message if the conversation has none
        """
        carrier = max((rank for rank, turn in self.read if turn.has_passages), default=None)
        texts = {rank: self._written(turn.role, turn.text) for rank, turn in self.read}
        if carrier is None:
            return self._ends(texts, system), []
        split, role = split_parts(self.turns[carrier].parts), self.turns[carrier].role
        texts[carrier] = CONTEXT_MARK.join(self._written(role, side) for side in (split.head, split.tail))
        return self._ends(texts, system)._replace(label_ids=split.label_ids(self._tokenizer)), split.passages

    def around_passages(self, form: PromptFormat, system: str | None, *, first: bool) -> PromptEnds:
        """Return ends around passages in front of the last user turn, or of the first. Questions get the store's
        format.

        In front of the last turn, passages are next to the question. In front of the first turn, they follow the
        store's own prefix, which is needed if blocks were encoded after it.
        """
        users = [rank for rank, turn in self.read if turn.role == "user"]
        marked = users[0] if first else users[-1]
        texts = {
            rank: form.asked(as_text(self._tokenizer, turn.text.strip()))
            if turn.role == "user"
            else self._written(turn.role, turn.text)
            for rank, turn in self.read
        }
        texts[marked] = CONTEXT_MARK + texts[marked]
        return self._ends(texts, system)

    def in_pieces(self, form: PromptFormat | None, system: str | None) -> list[str | Slot | Said]:
        """Return the rendered conversation, cut at every turn's passages and around every answer.

        Text of an earlier turn is then the same piece at every later turn.

        form: the format that questions are put into, with a place for passages in front of each user turn; None: turns
              stay as they are, with the place where each holds its passages
        """
        places: list[Slot | Said] = []

        def mark(place: Slot | Said) -> str:
            places.append(place)
            return TURN_MARK.format(len(places) - 1)

        slots = {rank for rank, turn in self.read if turn.has_slot}.union(self.standing)
        texts = {rank: self._marked(rank, form, mark, has_slot=rank in slots) for rank, _ in self.read}
        marks = [TURN_MARK.format(number) for number in range(len(places))]
        shown = self._shown.as_text(self._tokenizer)
        pieces = conversation_pieces(self._tokenizer, self._messages(texts, system), marks, shown)
        found: list[str | Slot | Said] = [pieces[0]]
        for place, piece in zip(places, pieces[1:], strict=True):
            found += [place, piece]
        return found

    def _marked(
        self, rank: int, form: PromptFormat | None, mark: Callable[[Slot | Said], str], *, has_slot: bool
    ) -> str:
        turn, tokenizer = self.turns[rank], self._tokenizer
        goes_on = self.continues and rank == len(self.turns) - 1
        if turn.is_answer and turn.text and not goes_on:  # some templates drop the text beside calls
            return mark(Said(rank))
        if not has_slot:
            return as_text(tokenizer, turn.text)
        if form is not None:
            return mark(Slot(rank)) + form.asked(as_text(tokenizer, turn.text.strip()))
        split = split_parts(turn.parts) if turn.has_passages else SplitParts("", [], [], turn.text)
        if label := next(filter(None, split.labels), None):
            raise PromptError(
                f'{label[:40]!r} stands between two passages, which context="keep" does not take; put it before, '
                "behind or into a passage"
            )
        return f"{as_text(tokenizer, split.head)}{mark(Slot(rank))}{as_text(tokenizer, split.tail)}"

    def _ends(self, texts: Mapping[int, str], system: str | None) -> PromptEnds:
        shown = self._shown.as_text(self._tokenizer)
        return conversation_ends(self._tokenizer, self._messages(texts, system), shown)

    def _messages(self, texts: Mapping[int, str], system: str | None) -> list[dict[str, Any]]:
        """Return the messages for the chat template. texts: of the turns that are read, by rank"""
        turns = [self.turns[rank].message(self._tokenizer, text) for rank, text in texts.items()]
        if self.continues:
            turns[-1]["content"] += END_MARK
        has_system = any(turn.role == "system" for turn in self.turns)
        return turns if has_system else [*system_turn(self._tokenizer, system), *turns]

    def _written(self, role: str, text: str) -> str:
        """Return a turn's text for the template, which itself decides about control tokens in an assistant's text."""
        return text if role == "assistant" else as_text(self._tokenizer, text)


def completion_ends(
    tokenizer: PreTrainedTokenizerBase, parts: str | Sequence[Part | int]
) -> tuple[PromptEnds, list[Given]]:
    """Return ends around the passages of a raw prompt, and these passages. Token ids stay unchanged.

    Raises PromptError.
    """
    if parts and not isinstance(parts, str) and (ids := [part for part in parts if type(part) is int]) == list(parts):
        return PromptEnds((), ids), []
    turn = _turn(0, {"role": "user", "content": parts})
    if not turn.text.strip():
        raise PromptError("the prompt is empty; write something")
    if not turn.has_passages:
        return text_ends(tokenizer, turn.text, None), []
    split = split_parts(turn.parts)
    ends = text_ends(tokenizer, split.head, split.tail)
    return ends._replace(label_ids=split.label_ids(tokenizer)), split.passages


class SplitParts(NamedTuple):
    """A turn's parts, split at its passages.

    head:   text before the first passage
    labels: text in front of each passage; "" for the first, and if only white space separates two passages
    tail:   text after the last passage
    """

    head: str
    labels: list[str]
    passages: list[Given]
    tail: str

    def label_ids(self, tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
        """Return the ids of each label alone, or [] if no passage has a label."""
        return [encode_text(tokenizer, label) if label else [] for label in self.labels] if any(self.labels) else []


def split_parts(parts: Sequence[Part]) -> SplitParts:
    """Split a turn at its passages. White space between passages is dropped, because each ends with its own newline."""
    places = [place for place, part in enumerate(parts) if not isinstance(part, str)]
    head, tail = ("".join(map(_text, side)) for side in (parts[: places[0]], parts[places[-1] + 1 :]))
    between = ["".join(map(_text, parts[before + 1 : place])) for before, place in pairwise(places)]
    labels = ["", *(text.lstrip("\n") if text.strip() else "" for text in between)]
    return SplitParts(head, labels, [part for part in parts if not isinstance(part, str)], tail)


def _turn(rank: int, message: Mapping[str, Any]) -> Turn:
    role = message.get("role") if isinstance(message, Mapping) else None
    if role not in ROLES:
        raise PromptError(f"message {rank} has role {role!r}; roles are {', '.join(ROLES)}")
    calls = _calls(rank, message.get("tool_calls") or ())
    content = message.get("content")
    content = "" if content is None and calls else content
    parts = (content,) if isinstance(content, str) else content
    if not isinstance(parts, list | tuple) or not all(isinstance(part, Part) for part in parts):
        raise PromptError(f"the content of message {rank} is neither text nor a list of texts and passages")
    if any(MARK in part for part in parts if isinstance(part, str)):
        raise PromptError(f"message {rank} holds the private character sequence that marks the place of passages")
    named = {field: str(message.get(key) or "") for field, key in (("call_id", "tool_call_id"), ("name", "name"))}
    return Turn(str(role), tuple(parts), calls, **named)


def _calls(rank: int, calls: Any) -> tuple[ToolCall, ...]:
    """Return a message's calls, given as `ToolCall`s or in OpenAI's form."""
    try:
        return tuple(call if isinstance(call, ToolCall) else _call(call) for call in calls)
    except (TypeError, KeyError, AttributeError) as error:
        raise PromptError(
            f"tool_calls of message {rank} cannot be read; each is an object like "
            '{"id": "abc", "type": "function", "function": {"name": "search", "arguments": "{}"}}'
        ) from error


def _call(call: Mapping[str, Any]) -> ToolCall:
    function = call["function"]
    arguments = function.get("arguments") or "{}"
    written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return ToolCall(str(call.get("id") or ""), str(function["name"]), written)


def _shown(call: ToolCall) -> dict[str, Any]:
    """Return a call as chat templates take it: its arguments are an object if they are JSON."""
    try:
        arguments = json.loads(call.arguments)
    except (ValueError, RecursionError):
        arguments = call.arguments
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _named(turns: Sequence[Turn]) -> list[Turn]:
    """Return the turns with the function's name on each tool result, which templates need."""
    names = {call.id: call.name for turn in turns for call in turn.calls}
    return [replace(turn, name=turn.name or names.get(turn.call_id, "")) for turn in turns]


def _text(part: Part) -> str:
    if isinstance(part, str):
        return part
    text = part.text if isinstance(part, Passage) else part.chunk.text
    return f"{text.rstrip()}\n"
