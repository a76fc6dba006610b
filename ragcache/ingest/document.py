"""A document to ingest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ragcache.errors import IngestError, ReaderError
from ragcache.kv.block_key import digest
from ragcache.store.json_values import check_metadata, text_problem
from ragcache.store.places import Place, check_places

HANDLE_KEY = "ragcache_handle"
"""Metadata field in which integrations return the handle of a passage's KV block. Documents drop it."""


@dataclass(frozen=True)
class Document:
    """A text to ingest, with its id and metadata.

    id:       the document's id in the store; ingesting the same id again replaces the document
    text:     plain text or Markdown; the chunker prefers to cut at Markdown's structure
    metadata: a JSON object, for filters; a handle that a search added (HANDLE_KEY) is dropped
    title:    shown to the embedder with every chunk
    source:   origin of the document, for people (a path, a URL); if empty, the id is used
    places:   pages, sheets or rows of the file, by offsets into the text; a passage's own place is in its metadata
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
        """Return the name by which messages refer to this document."""
        return self.source or self.id

    def check(self) -> None:
        """Check that a store can hold the document.

        Raises IngestError (no id), MetadataError (metadata is not JSON) or ReaderError (no text, or text that no store
        can hold).
        """
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
        """Return the SHA-256 of everything that the stored chunks depend on.

        The id and the source are not included, so that a file that moves keeps its hash. If the document has places,
        their SHA-256 follows.

        settings: the chunker's settings
        """
        content = {
            "text": self.text, "metadata": dict(self.metadata), "title": self.title, "settings": dict(settings)
        }  # fmt: skip
        places = [[place.start, dict(place.fields), place.row] for place in self.places]
        return digest(content) + (f"+{digest(places)}" if places else "")


def headed(title: str, text: str) -> str:
    """Return the text with its title above it as a heading, unless the text begins with the title."""
    title = " ".join(title.split())
    return f"# {title}\n\n{text}" if title and not text.lstrip("# \n").startswith(title) else text
