"""Copy the documents of another store, which may be of another model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ragcache.errors import PromptError
from ragcache.ingest.chunker import TextChunk
from ragcache.ingest.document import Document
from ragcache.ingest.report import IngestReport, Progress
from ragcache.ingest.run import IngestRun, Input, Prepared
from ragcache.ingest.whole import WholeTexts
from ragcache.ingest.workbench import Say, Work, Workbench
from ragcache.models.deadline import LIMIT
from ragcache.store.documents import DocumentStore
from ragcache.store.records import Chunk, StoredDocument, StoredVersion

if TYPE_CHECKING:
    from ragcache.ingest.pipeline import Ingestor


class StoredCuts(WholeTexts):
    """Stands in for a Chunker where a store has cut the documents already: its passages, under their ids."""

    def __init__(self, tokenizer: Any, max_tokens: int) -> None:
        super().__init__(tokenizer, max_tokens)
        self._ids: dict[str, list[str]] = {}

    def take(self, document: StoredDocument, chunks: Sequence[Chunk]) -> list[TextChunk]:
        """The document's chunks with this tokenizer's ids."""
        self._ids[document.id] = [chunk.id for chunk in chunks]
        rows = self.encode([chunk.text for chunk in chunks])
        return [as_cut(chunk, ids, document.metadata) for chunk, ids in zip(chunks, rows, strict=True)]

    def chunk_id(self, document_id: str, ordinal: int) -> str:
        return self._ids[document_id][ordinal]


class CopyRun(IngestRun):
    """One call of `Ingestor.copy`. What is there already, under the same version, is left alone."""

    def __init__(
        self,
        source: DocumentStore,
        ingestor: Ingestor,
        bench: Workbench,
        work: Callable[[IngestReport, Say], Work],
        cuts: StoredCuts,
        *,
        eager: bool,
        progress: Progress | None,
    ) -> None:
        super().__init__(ingestor, bench, work, eager=eager, progress=progress)
        self._source = source
        self._cuts = cuts

    def _prepared(self, inputs: Sequence[Input]) -> Iterator[Prepared]:
        there = self.to.documents.versions()
        for document in self._source.documents():
            LIMIT.get().check()
            version = StoredVersion(document.content_hash, document.source, document.file or "")
            if there.get(document.id) == version:
                self._tell_unchanged(document.id)
            elif (prepared := self._copied(document, replaces=document.id in there)) is not None:
                yield prepared

    def _copied(self, document: StoredDocument, *, replaces: bool) -> Prepared | None:
        made = Document(document.id, "", document.metadata, document.title, document.source)
        try:
            chunks = self._cuts.take(document, self._source.chunks_of(document.id))
            for chunk in chunks:
                self.to.names.check(chunk.token_ids, made.where)
        except PromptError as error:  # too long for this model
            self._fail(made.where, error, "")
            return None
        keys = [self.to.names.key(chunk.token_ids) for chunk in chunks]
        return Prepared(made, document.file or "", document.content_hash, chunks, keys, replaces)


def as_cut(chunk: Chunk, token_ids: list[int], metadata: Mapping[str, Any]) -> TextChunk:
    """A stored chunk as the chunker made it. metadata: its document's; where those have "headings", a chunk's own are
    not told from them."""
    headings = () if "headings" in metadata else tuple(chunk.metadata.get("headings", ()))
    return TextChunk(chunk.text, token_ids, headings)
