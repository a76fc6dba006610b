"""Ways to pass passages to the model: next to a prompt, inside a chat message, inside a raw prompt.

    llm.chat(messages, segments=nodes)                    before the last user message
    ChatMessage(blocks=[TextBlock(...), PassageBlock(...), ...])    at their place in the message
    llm.complete(FusedPrompt(["Read:\\n", passage, "\\nQ: ..."]))   at their place in a raw prompt

A PassageBlock is a text block and a FusedPrompt a string, so code that passes them on, and other models, see text.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

from llama_index.core.base.llms.types import TextBlock
from llama_index.core.bridge.pydantic import Field
from llama_index.core.schema import BaseNode, MetadataMode, NodeWithScore

import ragcache as rc
from llama_index.vector_stores.ragcache.nodes import bare, handle_of
from ragcache.errors import PromptError

Segment = rc.Passage | rc.Hit | NodeWithScore | BaseNode | Mapping[str, Any] | str
Part = str | rc.Passage | rc.Hit
_FIELDS = ("text", "id", "handle", "score", "metadata")


class PassageBlock(TextBlock):
    """A passage inside a chat message. handle: a hint; the text is always read. metadata: returned with the
    answer's sources
    """

    passage_id: str | None = None
    handle: str | None = None
    metadata: dict[str, Any] = Field(default_factory=dict)

    @classmethod
    def of(cls, passage: rc.Passage | rc.Hit) -> Self:
        if isinstance(passage, rc.Hit):
            return cls(text=passage.chunk.text, passage_id=passage.chunk.id, handle=passage.handle)
        return cls(text=passage.text, passage_id=passage.id, handle=passage.handle, metadata=dict(passage.metadata))

    def passage(self) -> rc.Passage:
        return rc.Passage(self.text, self.passage_id, self.handle, metadata=self.metadata)


class FusedPrompt(str):
    """A raw prompt with passages in it. As a string it is the whole text.

    parts: the texts and passages that it was made of
    """

    parts: tuple[Part, ...]

    def __new__(cls, parts: str | Sequence[str | Segment]) -> Self:
        given = (parts,) if isinstance(parts, str) else parts
        made = tuple(part if isinstance(part, str) else as_passage(part) for part in given)
        prompt = super().__new__(cls, "".join(_text(part) for part in made))
        prompt.parts = made
        return prompt


def as_passages(segments: Iterable[Segment]) -> list[rc.Passage | rc.Hit]:
    """Return the segments as passages. Raises PromptError naming a value that is not a segment."""
    if isinstance(segments, str | Mapping):
        raise PromptError(f"segments is a {type(segments).__name__}; give a list of segments")
    return [as_passage(segment) for segment in segments]


def as_passage(segment: Segment, metadata_mode: MetadataMode = MetadataMode.NONE) -> rc.Passage | rc.Hit:
    """Return a passage for a Passage or Hit, a node, a mapping with text, id and handle, or a text.

    metadata_mode: the part of a node's metadata that is read with its text. Raises PromptError.
    """
    if isinstance(segment, rc.Passage | rc.Hit):
        return segment
    if isinstance(segment, NodeWithScore):
        return _of_node(segment.node, segment.score, metadata_mode)
    if isinstance(segment, BaseNode):
        return _of_node(segment, None, metadata_mode)
    if isinstance(segment, str):
        return rc.Passage(segment)
    if isinstance(segment, Mapping) and segment and set(segment) <= set(_FIELDS):
        return rc.Passage(**segment)
    raise PromptError(
        f"{segment!r:.80} is no segment; give a node, a ragcache.Passage, a text, or a mapping with 'text', 'id' and "
        "'handle'"
    )


def _of_node(node: BaseNode, score: float | None, metadata_mode: MetadataMode) -> rc.Passage:
    text = node.get_content(metadata_mode=metadata_mode)
    return rc.Passage(text, node.node_id, handle_of(node), score, bare(node).metadata)


def _text(part: Part) -> str:
    """Return a part's text as the model reads it: a passage ends with exactly one newline."""
    if isinstance(part, str):
        return part
    text = part.text if isinstance(part, rc.Passage) else part.chunk.text
    return f"{text.rstrip()}\n"
