"""A document to ingest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ragcache.errors import IngestError, ReaderError
from ragcache.kv.block_key import digest
from ragcache.store.json_values import check_metadata, text_problem


@dataclass(frozen=True)
class Document:
    """A text and what is known about it.

    id:       names the document in the store; ingesting the same id again replaces it
    text:     plain text or Markdown; Markdown's structure is used to find good places to cut
    metadata: a JSON object, for filters
    title:    given to the embedder with every chunk
    source:   where it came from, for people (a path, a URL); the id when empty
    """

    id: str
    text: str
    metadata: Mapping[str, Any] = field(default_factory=dict)
    title: str = ""
    source: str = ""

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
            self._check_text(name, value)
        check_metadata(self.where, dict(self.metadata) if isinstance(self.metadata, Mapping) else self.metadata)

    def content_hash(self, settings: Mapping[str, Any]) -> str:
        """SHA-256 of all that its stored chunks depend on; `settings` are those of the chunker. Its id and source are
        not among them: a file that moves keeps it."""
        return digest(self._content(settings))

    def earlier_content_hash(self, settings: Mapping[str, Any], source: str) -> str:
        """The content hash of stores before schema version 3, which took in the source."""
        return digest({**self._content(settings), "source": source})

    def _content(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "text": self.text, "metadata": dict(self.metadata), "title": self.title, "settings": dict(settings)
        }  # fmt: skip

    def _check_text(self, name: str, value: str) -> None:
        if not isinstance(value, str):
            raise ReaderError(self.where, f"its {name} is {type(value).__name__}, not a string")
        if problem := text_problem(value):
            raise ReaderError(self.where, f"its {name} holds {problem}: it is binary, or in another encoding")


def headed(title: str, text: str) -> str:
    """The text below its title as a heading, unless it begins with it."""
    title = " ".join(title.split())
    return f"# {title}\n\n{text}" if title and not text.lstrip("# \n").startswith(title) else text
