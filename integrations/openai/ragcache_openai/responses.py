"""/v1/responses: chats in the format of OpenAI's newer API, which can continue from answers that the server keeps."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import count
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import Field, JsonValue, field_validator
from starlette.requests import Request
from starlette.responses import Response

from ragcache import Answer, Done, Sampling, Source, Sources, Token
from ragcache.engine.answer import Event
from ragcache.errors import RagCacheError
from ragcache.models.thoughts import Effort
from ragcache.server import chat_types
from ragcache.server import observe as logs
from ragcache.server.answers import citations, sources_of
from ragcache.server.body import JsonRoute
from ragcache.server.chat import EXPLAINS, Writer, call_of, respond
from ragcache.server.error_object import event
from ragcache.server.http_errors import ApiError, errors, streamed
from ragcache.server.service import Work
from ragcache.server.wire import AnswerModel, LooseModel, Name, RequestModel, Text
from ragcache_openai.api import Caller, CallerParam, Deleted, Id, Metadata, absent
from ragcache_openai.items import InputItem, InputItems, InputMessage, check_room, kept_items, messages_of, text_of
from ragcache_openai.records import Record, new_id
from ragcache_openai.search import FileSearchTool, check_stores, files_in, place_of, shown_hits, translated


class FlatSchemaFormat(chat_types.JsonSchema):
    type: Literal["json_schema"]

    def as_format(self) -> chat_types.SchemaFormat:
        schema = chat_types.JsonSchema(name=self.name, schema=self.schema_)
        return chat_types.SchemaFormat(type="json_schema", json_schema=schema)


class TextOptions(RequestModel):
    format: (
        Annotated[chat_types.PlainFormat | chat_types.JsonFormat | FlatSchemaFormat, Field(discriminator="type")] | None
    ) = None
    verbosity: None = None


class ReasoningField(LooseModel):
    """Options of reasoning. effort: how much the model thinks

    Other fields are ignored: reasoning is not sent to the client, so that there is nothing to summarise.
    """

    effort: Effort | None = None


class FileSearchChoice(RequestModel):
    type: Literal["file_search"]


class ResponsesRequest(chat_types.Ignored):
    """OpenAI's newer request for an answer.

    tools: file_search at most; the server searches the vector stores for the last user message, and the model reads the
           passages found
    """

    model: Name
    input: Annotated[Text, Field(min_length=1)] | InputItems
    instructions: Text | None = None
    max_output_tokens: chat_types.TokenCount | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    stream: bool | None = None
    stream_options: chat_types.StreamOptions | None = None
    text: TextOptions | None = None
    metadata: Metadata | None = None  # type: ignore[assignment]  # it is kept, and given back
    ragcache: chat_types.Extension | None = None
    reasoning: ReasoningField | None = None
    previous_response_id: Id | None = None
    tools: Annotated[list[FileSearchTool], Field(max_length=1)] | None = None
    tool_choice: Literal["none", "auto", "required"] | FileSearchChoice | None = None
    include: list[Literal["file_search_call.results"]] | None = None

    parallel_tool_calls: bool | None = None  # accepted and ignored

    # Features that this server lacks: only values that disable them are accepted.
    background: Literal[False] | None = None
    context_management: chat_types.Nothing | None = None
    conversation: None = None
    moderation: None = None
    prompt: None = None
    top_logprobs: Annotated[int, Field(ge=0, le=0)] | None = None
    truncation: Literal["disabled"] | None = None

    @field_validator("input")
    @classmethod
    def _says_something(cls, given: str | list[InputItem]) -> str | list[InputItem]:
        if not any(isinstance(one, str | InputMessage) for one in given):
            raise ValueError("it holds no message")
        return given

    @property
    def extension(self) -> chat_types.Extension:
        return self.ragcache or chat_types.Extension()

    @property
    def items(self) -> list[dict[str, Any]]:
        """Return the input as items to keep."""
        if isinstance(self.input, str):
            return kept_items([InputMessage(role="user", content=self.input)])
        return kept_items(self.input)

    @property
    def search(self) -> FileSearchTool | None:
        return self.tools[0] if self.tools and self.tool_choice != "none" else None

    def as_chat(self, history: Sequence[dict[str, Any]] = ()) -> chat_types.ChatRequest:
        """Return the request as a chat request. history: kept items before the input"""
        told = [chat_types.Message(role="system", content=self.instructions)] if self.instructions else []
        form = self.text.format if self.text is not None else None
        return chat_types.ChatRequest(
            model=self.model,
            messages=[*told, *messages_of([*history, *self.items])],
            max_completion_tokens=self.max_output_tokens,
            reasoning_effort=self.reasoning.effort if self.reasoning else None,
            temperature=self.temperature,
            top_p=self.top_p,
            stream=self.stream,
            response_format=form.as_format() if isinstance(form, FlatSchemaFormat) else form,
            ragcache=self._searching(),
        )

    def _searching(self) -> chat_types.Extension | None:
        """Return the extension with the options of the file search added."""
        if self.search is None:
            return self.ragcache
        found = self.search.filters and translated(self.search.filters, "tools[0].filters")
        both = [one for one in (self.extension.filter, found) if one]
        given: dict[str, Any] = {"filter": {"$and": both} if both else None, "retrieve": True}
        if self.search.max_num_results is not None:
            given["k"] = self.search.max_num_results
        if self.search.ranking_options is not None:
            given |= self.search.ranking_options.options()
        searching: chat_types.Extension = self.extension.model_copy(update=given)
        return searching


class OutputText(AnswerModel):
    type: Literal["output_text"]
    text: str
    annotations: list[dict[str, JsonValue]]
    logprobs: list[JsonValue]


class OutputMessage(AnswerModel):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    status: Literal["in_progress", "completed", "incomplete"]
    content: list[OutputText]


class FileSearchResult(AnswerModel):
    file_id: str
    filename: str
    score: float
    attributes: dict[str, str | bool | int | float]
    text: str


class FileSearchCall(AnswerModel):
    """A file search and its queries. results: null unless the request's `include` names them"""

    id: str
    type: Literal["file_search_call"]
    status: Literal["in_progress", "completed"]
    queries: list[str]
    results: list[FileSearchResult] | None


class InputTokensDetails(AnswerModel):
    cached_tokens: int


class OutputTokensDetails(AnswerModel):
    reasoning_tokens: int


class ResponseUsage(AnswerModel):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(AnswerModel):
    reason: Literal["max_output_tokens"]


class ResponseObject(AnswerModel):
    """An answer. status: "incomplete" if the answer ended at the most tokens that it may have"""

    id: str
    object: Literal["response"]
    created_at: int
    model: str
    status: Literal["in_progress", "completed", "incomplete"]
    error: None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    output: list[FileSearchCall | OutputMessage]
    parallel_tool_calls: bool
    previous_response_id: str | None
    store: bool
    temperature: float
    top_p: float
    tool_choice: str | dict[str, JsonValue]
    tools: list[dict[str, JsonValue]]
    metadata: dict[str, Any]
    usage: ResponseUsage | None
    ragcache: chat_types.ChatExtension = chat_types.ChatExtension()


class ResponseEvent(AnswerModel):
    """An event of a stream; its type says which of the fields it has."""

    type: str
    sequence_number: int
    response: ResponseObject | None = None
    item: FileSearchCall | OutputMessage | None = None
    part: OutputText | None = None
    item_id: str | None = None
    output_index: int | None = None
    content_index: int | None = None
    delta: str | None = None
    text: str | None = None
    annotation: dict[str, JsonValue] | None = None
    annotation_index: int | None = None
    logprobs: list[JsonValue] = Field(default_factory=list)
    code: str | None = None
    message: str | None = None
    param: str | None = None


router = APIRouter(route_class=JsonRoute, tags=["answers"])
Status = Literal["in_progress", "completed", "incomplete"]
RESPONSE = "response"
"""Kind of the records of kept answers."""


@router.post(
    "/v1/responses",
    dependencies=[EXPLAINS],
    summary="Answer the last user message, in the shapes of OpenAI's newer API",
    responses={
        200: streamed(ResponseObject, "The answer; with stream: true, events", ResponseEvent),
        **errors(400, 404, 409, 413, 415, 503, 504),
    },
)
async def create_response(request: Request, caller: CallerParam, asked: ResponsesRequest) -> Response:
    service, kb = caller.service, caller.service.kb
    retrieves = service.retrieves(asked.model)
    history = await caller.read(_chain, caller, asked.previous_response_id)
    if asked.search is not None:
        if asked.extension.documents is not None:
            message = "file_search finds the passages; leave ragcache.documents out, or tools"
            raise ApiError(400, message, "invalid_value", "ragcache.documents")
        await check_stores(caller, asked.search.vector_store_ids, "tools[0].vector_store_ids")
        kb = await caller.read(files_in, service.unfiltered, asked.search.vector_store_ids)
    check_room(len(history) + len(asked.items) + 1, 0, "input")
    chat = asked.as_chat(history)
    call = await call_of(service, chat, service.settings.answers, retrieves=retrieves)
    writer = ResponseWriter(
        service, request, asked.model, asked=asked, sampling=call.options["sampling"], caller=caller
    )
    events = kb.astream_chat(call.messages, **call.options)
    return await respond(writer, chat, [_kept(events, writer)], asked.extension.timeout_s)


async def _kept(events: AsyncIterator[Event], writer: ResponseWriter) -> AsyncIterator[Event]:
    """Yield the events. Before the event with the sources their files are looked up, and before the last event the
    answer is kept."""
    async with aclosing(events) as open_events:  # type: ignore[type-var]
        async for one in open_events:
            if isinstance(one, Sources):
                await writer.look_up(one.hits)
            elif isinstance(one, Done):
                await writer.keep(one.answer)
            yield one


def _chain(caller: Caller, id: str | None) -> list[dict[str, Any]]:
    """Return the inputs and outputs up to a kept answer, oldest first; none without an id.

    Raises ApiError (400, as in OpenAI's API) if an answer was deleted or is another key's, or if there are too many.
    """
    found: list[list[dict[str, Any]]] = []
    param, count, letters = "previous_response_id", 0, 0
    while id is not None:
        record = caller.records.get(RESPONSE, caller.owner, id)
        if record is None:
            raise absent("previous response", id, param, 400)
        response = record.body["response"]
        found.append([*record.body["input"], *response["output"]])
        count, letters = count + len(found[-1]), letters + sum(len(text_of(item)) for item in found[-1])
        check_room(count, letters, param)
        id = response["previous_response_id"]
    return [item for part in reversed(found) for item in part]


@router.get(
    "/v1/responses/{id}", summary="An answer that was kept", responses={200: {"model": ResponseObject}, **errors(404)}
)
async def get_response(caller: CallerParam, id: str) -> Response:
    record = await caller.find(RESPONSE, id, "response", "response_id")
    return Response(json.dumps(record.body["response"]), media_type="application/json")


@router.delete("/v1/responses/{id}", summary="Delete an answer that was kept", responses=errors(404))
async def delete_response(caller: CallerParam, id: str) -> Deleted:
    await caller.find(RESPONSE, id, "response", "response_id")
    await caller.read(caller.records.delete, [id])
    return Deleted(id=id, object="response", deleted=True)


@dataclass
class ResponseWriter(Writer):
    """Writes an answer in the format of OpenAI's newer API.

    item, search_id: ids of its message and its file search
    numbers: sequence numbers of its events
    found: results of the file search
    kept: whether another answer can continue from this answer
    """

    id: str = field(default_factory=lambda: new_id("resp_"))
    item: str = field(default_factory=lambda: new_id("msg_"))
    search_id: str = field(default_factory=lambda: new_id("fs_"))
    numbers: Iterator[int] = field(default_factory=count)
    found: list[dict[str, Any]] = field(default_factory=list)
    asked: ResponsesRequest = field(kw_only=True)
    sampling: Sampling = field(kw_only=True)
    caller: Caller = field(kw_only=True)

    def __post_init__(self) -> None:
        most = self.service.settings.keep_responses
        self.kept = self.asked.store is not False and most > 0 and not self.service.kb.config.read_only
        self.items = self.asked.items

    async def look_up(self, hits: Sequence[Source]) -> None:
        """Look up the files of the hits, if the request has a file search."""
        if self.asked.search is not None:
            self.found = await shown_hits(self.caller, hits)

    async def keep(self, answer: Answer) -> None:
        """Keep the answer. If that fails, it is sent anyway, with store: false."""
        if not self.kept:
            return
        body = {"response": json.loads(self.whole(answer).to_json()), "input": self.items}
        records, kept = self.caller.records, Record(self.id, RESPONSE, self.caller.owner, body)
        try:
            await self.caller.read(records.add, [kept])
            most = self.service.settings.keep_responses
            await self.caller.read(records.keep_newest, RESPONSE, self.caller.owner, most)
        except RagCacheError as error:
            logs.write_failure(error)
            self.kept = False

    def completion(self, answers: Sequence[Answer]) -> AnswerModel:
        return self.whole(answers[0])

    async def chunks(self, rank: int, first: Event, work: Work[Event], *, usage: bool) -> AsyncIterator[bytes]:
        """Yield the events of the stream; see `Writer.chunks`."""
        found = chat_types.ChatExtension(sources=sources_of(first.hits if isinstance(first, Sources) else []))
        for name in ("response.created", "response.in_progress"):
            yield self.say(name, response=self.response("in_progress", [], None, found))
        for searched in self.searches():
            place = {"output_index": 0, "item_id": searched.id}
            begun = searched.model_copy(update={"status": "in_progress", "results": None})
            yield self.say("response.output_item.added", output_index=0, item=begun)
            for name in ("in_progress", "searching", "completed"):
                yield self.say(f"response.file_search_call.{name}", **place)
            yield self.say("response.output_item.done", output_index=0, item=searched)
        last = len(self.searches())
        yield self.say("response.output_item.added", output_index=last, item=self.message("in_progress", []))
        yield self.say("response.content_part.added", **self._place(), part=_part(""))
        async for _, one in work:
            if isinstance(one, Token) and one.text:
                yield self.say("response.output_text.delta", **self._place(), delta=one.text, logprobs=[])
            elif isinstance(one, Done):
                whole, message = self.whole(one.answer), self.answered(one.answer)
                part = message.content[0]
                for rank, cited in enumerate(part.annotations):
                    place = {**self._place(), "annotation_index": rank}
                    yield self.say("response.output_text.annotation.added", **place, annotation=cited)
                yield self.say("response.output_text.done", **self._place(), text=part.text, logprobs=[])
                yield self.say("response.content_part.done", **self._place(), part=part)
                yield self.say("response.output_item.done", output_index=last, item=message)
                yield self.say(f"response.{whole.status}", response=whole)

    def failed(self, error: Exception) -> bytes:
        problem = self.problem(error)
        return self.say("error", code=problem.code, message=problem.body().error.message, param=problem.param)

    def say(self, type: str, **fields: Any) -> bytes:
        """Return the next event."""
        return event(ResponseEvent(type=type, sequence_number=next(self.numbers), **fields).to_json(), type)

    def whole(self, answer: Answer) -> ResponseObject:
        message = self.answered(answer)
        costs = chat_types.ChatExtension(sources=sources_of(answer.hits), **self.costs(answer))
        return self.response(message.status, [*self.searches(), message], _usage(answer), costs)

    def answered(self, answer: Answer) -> OutputMessage:
        status: Status = "completed" if answer.finish_reason == "stop" else "incomplete"
        return self.message(status, [_part(answer.text, _cited(answer))])

    def response(
        self,
        status: Status,
        output: list[FileSearchCall | OutputMessage],
        usage: ResponseUsage | None,
        costs: chat_types.ChatExtension,
    ) -> ResponseObject:
        asked = self.asked
        tools = [tool.model_dump(exclude_none=True) for tool in asked.tools or ()]
        choice = asked.tool_choice or ("auto" if tools else "none")
        return ResponseObject(
            id=self.id,
            object="response",
            created_at=self.created,
            model=self.model,
            status=status,
            error=None,
            incomplete_details=IncompleteDetails(reason="max_output_tokens") if status == "incomplete" else None,
            instructions=asked.instructions,
            output=output,
            parallel_tool_calls=False,
            previous_response_id=asked.previous_response_id,
            store=self.kept,
            temperature=self.sampling.temperature,
            top_p=1.0 if self.sampling.top_p is None else self.sampling.top_p,
            tool_choice=choice if isinstance(choice, str) else choice.model_dump(),
            tools=tools,
            metadata=asked.metadata or {},
            usage=usage,
            ragcache=costs,
        )

    def searches(self) -> list[FileSearchCall]:
        """Return a list with the file search, or an empty list if the request has none."""
        if self.asked.search is None:
            return []
        results = [FileSearchResult(**one) for one in self.found] if self.asked.include else None
        queries = [text_of(item) for item in reversed(self.items) if item["role"] == "user"][:1]
        made = FileSearchCall(
            id=self.search_id, type="file_search_call", status="completed", queries=queries, results=results
        )
        return [made]

    def message(self, status: Status, content: list[OutputText]) -> OutputMessage:
        return OutputMessage(id=self.item, type="message", role="assistant", status=status, content=content)

    def _place(self) -> dict[str, Any]:
        return {"item_id": self.item, "output_index": len(self.searches()), "content_index": 0}


def _part(text: str, cited: Sequence[dict[str, JsonValue]] = ()) -> OutputText:
    return OutputText(type="output_text", text=text, annotations=list(cited), logprobs=[])


def _cited(answer: Answer) -> list[dict[str, JsonValue]]:
    """Return the citations, in which a file of a vector store has its file id. Each file is cited once."""
    files = {hit.chunk.document_id: (place_of(hit.chunk) or "").partition("/")[2] for hit in answer.hits}
    found: dict[Any, dict[str, JsonValue]] = {}
    for one in citations(answer):
        if one["type"] == "file_citation":
            one["file_id"] = files.get(str(one["file_id"])) or one["file_id"]
        found.setdefault(one.get("file_id", one.get("url")), one)
    return list(found.values())


def _usage(answer: Answer) -> ResponseUsage:
    usage = answer.usage
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputTokensDetails(cached_tokens=usage.cached_tokens),
        output_tokens=usage.completion_tokens,
        output_tokens_details=OutputTokensDetails(reasoning_tokens=usage.reasoning_tokens),
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
    )
