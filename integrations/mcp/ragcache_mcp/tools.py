"""The tools that an MCP client calls: search, ask, add, delete."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any, TypeVar

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.server.mcpserver.tools import Tool
from mcp.types import ToolAnnotations
from pydantic import BaseModel, ConfigDict, Field, StringConstraints
from starlette.exceptions import HTTPException

from ragcache import Document, Hit, IngestReport, RagCache, Source, __version__
from ragcache.engine.options import retrieval
from ragcache.errors import RagCacheError

MOST_K = 1000
MOST_DOCUMENTS = 1000
WRITE_WAIT_S = 30.0
AT_ONCE = 8
INSTRUCTIONS = (
    "A library of documents. `search` finds passages, `ask` answers from them with a local model that has read them, "
    "`add` stores texts, `delete` removes them. Cite the `source` and `place` of what you use."
)

T = TypeVar("T")
Text = Annotated[str, StringConstraints(min_length=1)]
Question = Annotated[Text, Field(description="In plain words; a whole question finds more than a few key words")]
PassageCount = Annotated[
    int, Field(ge=1, le=MOST_K, description="Passages at most; the server's own number if left out")
]
MetadataFilter = Annotated[
    dict[str, Any],
    Field(
        description='Only documents whose metadata pass: {"year": {"$gte": 2020}}. Operators: $eq $ne $gt $gte $lt '
        "$lte $in $nin $exists $contains $glob, and $and, $or, $not around filters"
    ),
]
TokenCount = Annotated[int, Field(ge=1, description="Longest answer, in tokens; the server's own length if left out")]


class Passage(BaseModel):
    """A passage. score: inner product with the question. place: in its document, such as "p. 3"; empty if unknown"""

    text: str
    title: str
    source: str
    place: str
    document_id: str
    score: float


class Found(BaseModel):
    passages: list[Passage]


class Answered(BaseModel):
    """An answer. is_cut: whether it ended at the limit on its length"""

    answer: str
    sources: list[Passage]
    is_cut: bool


class NewDocument(BaseModel):
    model_config = ConfigDict(extra="forbid")

    id: Annotated[Text, Field(description="Adding the same id again replaces the document")]
    text: Annotated[Text, Field(description="Plain text or Markdown")]
    title: str = ""
    source: Annotated[str, Field(description="Where it is from, for people: a path or a URL")] = ""
    metadata: Annotated[dict[str, Any], Field(description="For filters")] = {}


class Failed(BaseModel):
    source: str
    error: str


class Added(BaseModel):
    added: list[str]
    updated: list[str]
    unchanged: list[str]
    failed: list[Failed]


class Deleted(BaseModel):
    """The ids that were deleted. unknown: ids that no document had"""

    deleted: list[str]
    unknown: list[str]


@dataclass
class Tools:
    """The functions of the tools.

    options:   defaults of a question, as for `RagCache.ask`
    timeout_s: limit for a question, waiting included; None: no limit
    """

    kb: RagCache
    options: Mapping[str, Any]
    timeout_s: float | None = None
    asking: asyncio.Semaphore = field(default_factory=partial(asyncio.Semaphore, AT_ONCE))
    changing: asyncio.Semaphore = field(default_factory=asyncio.Semaphore)

    async def search(
        self, query: Question, k: PassageCount | None = None, filter: MetadataFilter | None = None
    ) -> Found:
        """Find the passages of the library that fit a question best, without an answer."""
        options = self._options(k, filter)
        async with self._told():
            hits = await self.answered(lambda: self.seen().aretrieve(query, options["k"], **retrieval(options)))
        return Found(passages=[_passage(hit) for hit in hits])

    async def ask(
        self,
        question: Question,
        k: PassageCount | None = None,
        filter: MetadataFilter | None = None,
        max_tokens: TokenCount | None = None,
    ) -> Answered:
        """Answer a question from the library by a local model. `sources` are the passages that it read."""
        options = self._options(k, filter)
        if max_tokens is not None:
            options["sampling"] = replace(options["sampling"], max_tokens=max_tokens)
        async with self._told():
            answer = await self.answered(lambda: self.seen().aask(question, **options))
        sources = [_passage(hit) for hit in answer.hits if not hit.chunk.is_learnt]
        return Answered(answer=answer.text, sources=sources, is_cut=answer.finish_reason == "length")

    async def add(
        self, documents: Annotated[list[NewDocument], Field(min_length=1, max_length=MOST_DOCUMENTS)]
    ) -> Added:
        """Store texts. A document with an id that exists is replaced. Texts that cannot be stored are in `failed`."""
        given = [Document(one.id, one.text, one.metadata, one.title, one.source) for one in documents]
        async with self._told():
            report = await self.added(given)
        failed = [Failed(source=one.source, error=str(one.error)) for one in report.failed]
        return Added(added=report.added, updated=report.updated, unchanged=report.unchanged, failed=failed)

    async def delete(self, ids: Annotated[list[Text], Field(min_length=1, max_length=MOST_DOCUMENTS)]) -> Deleted:
        """Delete documents by id, with all that was computed from them. It cannot be undone."""
        async with self._told():
            deleted = await self.deleted(ids)
        return Deleted(deleted=deleted, unknown=[id for id in ids if id not in deleted])

    async def answered(self, work: Callable[[], Awaitable[T]]) -> T:
        """Run the work in a slot for questions, within the time limit."""
        try:
            async with asyncio.timeout(self.timeout_s), self.asking:
                return await work()
        except TimeoutError as error:
            way_out = "ask for fewer passages or a shorter answer, or again when the server has less to do"
            raise ToolError(f"no answer within {self.timeout_s:g} s; {way_out}") from error

    async def added(self, documents: Sequence[Document]) -> IngestReport:
        async with self.changing:
            return await self.seen().aingest(documents, timeout_s=WRITE_WAIT_S)

    async def deleted(self, ids: Sequence[str]) -> list[str]:
        async with self.changing:
            return await self.seen().adelete(ids, timeout_s=WRITE_WAIT_S)

    def seen(self) -> RagCache:
        """Return the knowledge base as the caller sees it."""
        return self.kb

    def tell(self, error: Exception) -> str:
        """Return an error's text for the client."""
        return str(error)

    def _options(self, k: int | None, filter: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return the options of a question. The server's own filter is combined with the caller's."""
        both = [one for one in (self.options.get("filter"), filter) if one]
        given = {"k": k or self.options["k"], "filter": {"$and": both} if len(both) > 1 else next(iter(both), None)}
        return {**self.options, **given}

    @asynccontextmanager
    async def _told(self) -> AsyncIterator[None]:
        """Report errors that a caller can act on to the caller; others are only logged."""
        try:
            yield
        except (RagCacheError, HTTPException) as error:
            raise ToolError(self.tell(error)) from error


def build(tools: Tools, *, writes: bool = True) -> MCPServer[Any]:
    """Return an MCP server with the tools. writes: offer `add` and `delete` too"""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    offered = [_strict(getattr(tools, name), hints) for name, hints in _hints(writes)]
    server: MCPServer[Any] = MCPServer(
        "ragcache", version=__version__, instructions=INSTRUCTIONS, subscriptions=False, tools=offered
    )
    root.handlers[:] = handlers  # restores the program's logging, which the package set up
    root.setLevel(level)
    return server


def _strict(function: Callable[..., Any], hints: ToolAnnotations) -> Tool:
    """Return a tool that refuses unknown arguments, so that a client that sends `limit` for `k` gets an error."""
    tool = Tool.from_function(function, annotations=hints, structured_output=True)
    arguments = tool.fn_metadata.arg_model
    arguments.model_config["extra"] = "forbid"
    arguments.model_rebuild(force=True)
    tool.parameters = arguments.model_json_schema(by_alias=True)
    return tool


def _hints(writes: bool) -> Iterator[tuple[str, ToolAnnotations]]:
    reads = {"read_only_hint": True, "idempotent_hint": True, "open_world_hint": False}
    yield "search", ToolAnnotations(title="Search the library", **reads)
    yield "ask", ToolAnnotations(title="Ask the library", **reads)
    if writes:
        changes = {"read_only_hint": False, "idempotent_hint": True, "open_world_hint": False}
        yield "add", ToolAnnotations(title="Add to the library", destructive_hint=True, **changes)
        yield "delete", ToolAnnotations(title="Delete from the library", destructive_hint=True, **changes)


def _passage(hit: Hit | Source) -> Passage:
    chunk = hit.chunk
    where = {"title": chunk.title, "source": chunk.source, "place": chunk.place, "document_id": chunk.document_id}
    return Passage(text=chunk.text, score=float(hit.score), **where)
