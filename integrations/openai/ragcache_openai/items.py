"""Items, the messages of an answer: as clients send them, as they are kept, and as the model reads them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from ragcache.server.chat_types import Message, TextPart
from ragcache.server.http_errors import ApiError
from ragcache.server.wire import LooseModel, Text
from ragcache_openai.records import new_id

MOST_ITEMS = 10_000
MOST_LETTERS = 16 << 20
"""Most items, and most characters of text, in a conversation that an answer continues."""
PARTS = {"user": "input_text", "system": "input_text", "developer": "input_text", "assistant": "output_text"}


class InputPart(LooseModel):
    """A part of a message, which is text. Clients send back parts of answers as they got them."""

    type: Literal["input_text", "output_text"]
    text: Text


class InputMessage(LooseModel):
    """A turn of the conversation. A client may send back an answer's item as it got it."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Text | list[InputPart]

    def as_message(self) -> Message:
        if isinstance(self.content, str):
            return Message(role=self.role, content=self.content)
        return Message(role=self.role, content=[TextPart(type="text", text=part.text) for part in self.content])

    def as_item(self) -> dict[str, Any]:
        """Return the item in the form in which it is kept and sent to clients: with an id, and its content in parts."""
        if isinstance(self.content, str):
            parts: list[dict[str, Any]] = [{"type": PARTS[self.role], "text": self.content}]
        else:
            parts = [part.model_dump() for part in self.content]
        for part in parts:
            if part["type"] == "output_text":
                part.setdefault("annotations", [])
        given = (self.model_extra or {}).get("status")
        status = given if given in ("completed", "incomplete") else "completed"
        return {"id": new_id("msg_"), "type": "message", "role": self.role, "status": status, "content": parts}


class PassedOver(LooseModel):
    """A model's reasoning or file search, which a client sends back with an answer. It is ignored."""

    type: Literal["reasoning", "file_search_call"]


InputItem = InputMessage | PassedOver
InputItems = Annotated[list[InputItem], Field(min_length=1, max_length=MOST_ITEMS)]
_kept: TypeAdapter[InputItem] = TypeAdapter(InputItem)


def kept_items(given: Iterable[InputItem]) -> list[dict[str, Any]]:
    return [one.as_item() for one in given if isinstance(one, InputMessage)]


def messages_of(items: Iterable[dict[str, Any]]) -> list[Message]:
    """Return kept items as messages for the model."""
    read = (_kept.validate_python(item) for item in items)
    return [one.as_message() for one in read if isinstance(one, InputMessage)]


def text_of(item: dict[str, Any]) -> str:
    parts = item.get("content") or ()
    return "\n".join(str(part.get("text", "")) for part in parts)


def check_room(count: int, letters: int, param: str) -> None:
    """Raise ApiError (400) for a chain of answers that has become too long."""
    if count > MOST_ITEMS or letters > MOST_LETTERS:
        raise ApiError(
            400,
            f"the conversation has {count:,} items and {letters:,} letters, and {MOST_ITEMS:,} and {MOST_LETTERS:,} "
            "are read; begin another one",
            "conversation_too_long",
            param,
        )
