"""A document to ingest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ragcache.errors import IngestError, ReaderError
from ragcache.kv.block_key import digest
from ragcache.store.json_values import check_metadata, text_problem
from ragcache.store.places import Place, check_places

HANDLE_KEY = "ragcache_handle"
"""Where integrations name a passage's KV block in the metadata that they return; no document keeps it."""


@dataclass(frozen=True)
class Document:
    """A text and what is known about it.

    id:       names the document in the store; ingesting the same id again replaces it
    text:     plain text or Markdown; Markdown's structure is used to find good places to cut
    metadata: a JSON object, for filters; a handle in it, which a search put there, is dropped
    title:    given to the embedder with every chunk
    source:   where it came from, for people (a path, a URL); the id when empty
    places:   where in its file the text was read, by offsets; each passage's own is in its metadata
    """

    id: str
    text: str
    metadata: Mapping[str, Any] = field(default_factory=dict)
    title: str = ""
    source: str = ""
    places: Sequence[Place] = ()

    def __post_init__(self) -> None:
        if isinstance(self.metadata, Mapping) and HANDLE_KEY in self.metadata:
            known = {key: value for key, value in self.metadata.items() if key != HANDLE_KEY}
            object.__setattr__(self, "metadata", known)

    @property
    def where(self) -> str:
        """How messages name this document."""
        return self.source or self.id

    def check(self) -> None:
        """Raises IngestError (no id), MetadataError (metadata is not JSON) or ReaderError (no text, or text that no
        store can hold)."""
        if not isinstance(self.id, str) or not self.id.strip():
            raise IngestError(f"a document of source {self.source!r} has no id; give it a non-empty string")
        if not isinstance(self.text, str) or not self.text.strip():
            raise ReaderError(self.where, "there is no text in it")
        for name, value in (("id", self.id), ("title", self.title), ("source", self.source), ("text", self.text)):
            if not isinstance(value, str):
                raise ReaderError(self.where, f"its {name} is {type(value).__name__}, not a string")
            if problem := text_problem(value):
                raise ReaderError(self.where, f"its {name} holds {problem}: it is binary, or in another encoding")
        check_metadata(self.where, dict(self.metadata) if isinstance(self.metadata, Mapping) else self.metadata)
        check_places(self.where, self.text, self.places)

    def content_hash(self, settings: Mapping[str, Any]) -> str:
        """Return the SHA-256 of all that its stored chunks depend on; `settings` are those of the chunker. Its id and
        source are not among them: a file that moves keeps it. If the document has places, their own SHA-256 follows: a
        document whose places alone changed keeps its chunks (see `hash_parts`).
        """
        content = {
            "text": self.text, "metadata": dict(self.metadata), "title": self.title, "settings": dict(settings)
        }  # fmt: skip
        places = [[place.start, dict(place.fields), place.row] for place in self.places]
        return digest(content) + (f"{PLACED}{digest(places)}" if places else "")


PLACED = "+"


class HashParts(NamedTuple):
    """The parts of a content hash: of text, title, metadata and settings, and of the places, "" without any."""

    content: str
    places: str


def hash_parts(content_hash: str) -> HashParts:
    content, _, places = content_hash.partition(PLACED)
    return HashParts(content, places)


def headed(title: str, text: str) -> str:
    """The text below its title as a heading, unless it begins with it."""
    title = " ".join(title.split())
    return f"# {title}\n\n{text}" if title and not text.lstrip("# \n").startswith(title) else text
