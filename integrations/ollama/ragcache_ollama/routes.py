"""/api: Ollama's routes for answers, embeddings and models, with its JSON lines and its errors."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import chain
from typing import Any, Literal

from fastapi import APIRouter
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from ragcache import Answer, Done, Reasoning, Token, ToolCall
from ragcache.engine.answer import Event
from ragcache.models.language_model import LanguageModel
from ragcache.models.thoughts import thinking_of
from ragcache.server.answers import chat_logprobs, read_options, sources_of
from ragcache.server.body import JsonRoute
from ragcache.server.chat import Writer, call_of, respond
from ragcache.server.chat_types import ChatExtension, Message
from ragcache.server.embeddings import EmbeddingRequest, embed
from ragcache.server.error_object import EventStream
from ragcache.server.http_errors import EVERYWHERE, STATUS_MEANINGS, ApiError, Responses, schema_of
from ragcache.server.service import Service, ServiceParam, Work, service_of
from ragcache.server.wire import AnswerModel
from ragcache_ollama.bodies import (
    AnswerCall,
    AnswerFunction,
    AnswerRequest,
    AnswerTurn,
    Details,
    Embeddings,
    EmbeddingsRequest,
    EmbedRequest,
    GenerateRequest,
    ModelEntries,
    ModelEntry,
    OllamaChatRequest,
    OllamaError,
    OneEmbedding,
    Part,
    Shown,
    ShowRequest,
    Version,
    checked,
    messages_of,
)

API_VERSION = "0.12.11"
"""The version of Ollama's API that is served: clients read it to learn what they may send."""
NEVER = "9999-12-31T23:59:59Z"
NDJSON = "application/x-ndjson"
NS = 1_000_000_000
LATEST = ":latest"
EMBEDDER = "embedder"
"""The family of an embedding model; its actual architecture is not given."""


class OllamaRouter(APIRouter):
    """A router whose errors have Ollama's form."""

    @staticmethod
    def error_body(problem: ApiError) -> OllamaError:
        return OllamaError(error=problem.body().error.message)


class AnyTypeRoute(JsonRoute):
    """A route that reads JSON whatever its content type: Ollama's own documentation sends it with curl's default."""

    content_type = ""


router = OllamaRouter(prefix="/api", route_class=AnyTypeRoute, tags=["ollama"])


def failures(*statuses: int) -> Responses:
    return {
        status: {"model": OllamaError, "description": STATUS_MEANINGS[status]} for status in (*statuses, *EVERYWHERE)
    }


def lines(model: type[BaseModel], description: str) -> dict[str, Any]:
    """Return a success response that is JSON, or lines of JSON."""
    return {"model": model, "description": description, "content": {NDJSON: {"schema": schema_of(model)}}}


def served_name(service: Service, asked: str) -> str:
    """Return the server's name of a model. Ollama's names have a tag, which is `:latest` by default."""
    names = (service.chat_model, service.plain_model, service.embedding_model)
    return next((name for name in (asked, asked + LATEST) if name in names), asked.removesuffix(LATEST))


def now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


# Answers

ANSWERED: Responses = {
    200: lines(Part, "The answer; in lines, unless stream is false"),
    **failures(400, 404, 409, 413, 503, 504),
}


@router.post("/chat", summary="Answer the last user message", responses=ANSWERED)
async def chat(request: Request, asked: OllamaChatRequest) -> Response:
    if not asked.messages:
        return loaded(request, asked, message=AnswerTurn(role="assistant", content=""))
    return await answer(request, asked, messages_of(asked.messages), ChatWriter)


@router.post("/generate", summary="Answer a prompt", responses=ANSWERED)
async def generate(request: Request, asked: GenerateRequest) -> Response:
    if not asked.prompt:
        return loaded(request, asked, response="")
    turn = Message(role="user", content=asked.prompt)
    if not asked.raw:
        system = [Message(role="system", content=asked.system)] if asked.system else []
        return await answer(request, asked, [*system, turn], PromptWriter)
    if name := next(iter(asked.unlike_raw), None):
        raise ApiError(400, f"{name!r} does not go with raw; leave one of them out", "invalid_value", name)
    service = service_of(request)
    service.retrieves(served_name(service, asked.model))
    told = asked.as_chat(asked.model, [turn], (), thinks=False)
    options = read_options(told, asked.defaults(service.settings.answers), service.kb.lm.max_positions)
    events = service.kb.astream_completion(asked.prompt, **options)
    return await respond(PromptWriter(service, request, asked.model), told, [events], told.extension.timeout_s)


async def answer(
    request: Request, asked: AnswerRequest, messages: Sequence[Message], writer: type[OllamaWriter]
) -> Response:
    service = service_of(request)
    name = served_name(service, asked.model)
    retrieves, lm = service.retrieves(name), service.kb.lm
    tools = asked.tools or () if isinstance(asked, OllamaChatRequest) else ()
    told = asked.as_chat(name, messages, tools, thinks=thinking_of(lm.tokenizer) is not None)
    call = await call_of(service, told, asked.defaults(service.settings.answers), retrieves=retrieves)
    events = service.kb.astream_chat(call.messages, **call.options)
    return await respond(writer(service, request, asked.model), told, [events], told.extension.timeout_s)


def loaded(request: Request, asked: AnswerRequest, **empty: Any) -> Response:
    """Return the response to a request without a prompt, by which Ollama loads or unloads a model. This model is
    always loaded.
    """
    service = service_of(request)
    service.retrieves(served_name(service, asked.model))
    reason: Literal["load", "unload"] = "unload" if asked.keep_alive in (0, "0", "0s", "0m", "0h") else "load"
    return Part(model=asked.model, created_at=now(), done=True, done_reason=reason, **empty).to_response()


class Lines(EventStream):
    media_type = NDJSON
    heartbeat = b""  # such a stream has no comments


@dataclass
class OllamaWriter(Writer):
    """Writes an answer in Ollama's format."""

    stream = Lines

    def said(self, text: str, thinking: str = "", calls: Sequence[ToolCall] = ()) -> dict[str, Any]:
        """Return the fields that hold a piece of an answer."""
        raise NotImplementedError

    def completion(self, answers: Sequence[Answer]) -> AnswerModel:
        (one,) = answers
        scores = {} if one.logprobs is None else {"logprobs": chat_logprobs(one.logprobs).content}
        return self.part(**self.said(one.text, one.reasoning, one.tool_calls), **scores, **self.end(one))

    async def chunks(self, rank: int, first: Event, work: Work[Event], *, usage: bool) -> AsyncIterator[bytes]:
        """Yield the lines of the stream."""
        async for _, one in work:
            if isinstance(one, Done):
                yield _line(self.part(**self.said(""), **self.end(one.answer)))
            elif isinstance(one, Token):
                scores = {"logprobs": chat_logprobs(one.logprobs).content} if one.logprobs else {}
                yield _line(self.part(**self.said(one.text), **scores, done=False))
            elif isinstance(one, Reasoning):
                yield _line(self.part(**self.said("", one.text), done=False))
            elif isinstance(one, ToolCall):
                yield _line(self.part(**self.said("", calls=[one]), done=False))

    def failed(self, error: Exception) -> bytes:
        return _line(OllamaRouter.error_body(self.problem(error)))

    def part(self, **fields: Any) -> Part:
        return Part(model=self.model, created_at=now(), **fields)

    def end(self, answer: Answer) -> dict[str, Any]:
        """Return the fields of the last line."""
        times, usage = answer.timings, answer.usage
        return {
            "done": True,
            "done_reason": "length" if answer.finish_reason == "length" else "stop",
            "total_duration": int(times.total_s * NS),
            "load_duration": 0,
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": int(max(0.0, times.ttft_s - times.queue_s) * NS),
            "eval_count": usage.completion_tokens,
            "eval_duration": int(max(0.0, times.total_s - times.ttft_s) * NS),
            "ragcache": ChatExtension(sources=sources_of(answer.hits), **self.costs(answer)),
        }


@dataclass
class ChatWriter(OllamaWriter):
    def said(self, text: str, thinking: str = "", calls: Sequence[ToolCall] = ()) -> dict[str, Any]:
        more: dict[str, Any] = {"thinking": thinking} if thinking else {}
        if calls:
            more["tool_calls"] = [AnswerCall(id=call.id, function=_called(call)) for call in calls]
        return {"message": AnswerTurn(role="assistant", content=text, **more)}


@dataclass
class PromptWriter(OllamaWriter):
    def said(self, text: str, thinking: str = "", calls: Sequence[ToolCall] = ()) -> dict[str, Any]:
        return {"response": text, **({"thinking": thinking} if thinking else {})}


def _called(call: ToolCall) -> AnswerFunction:
    """Return a call with its arguments as an object. If they are not an object, their text is put into an object."""
    arguments = json.loads(call.arguments) if call.error is None else {"arguments": call.arguments}
    return AnswerFunction(name=call.name, arguments=arguments)


def _line(part: AnswerModel) -> bytes:
    return f"{part.to_json()}\n".encode()


# Embeddings


@router.post("/embed", summary="Embed texts", responses=failures(400, 404, 413, 503, 504))
async def embed_texts(request: Request, asked: EmbedRequest) -> Embeddings:
    started = time.perf_counter()
    texts = [asked.input] if isinstance(asked.input, str) else asked.input
    vectors, tokens = await embedded(request, asked.model, [] if asked.input == "" else texts, asked)
    return Embeddings(
        model=asked.model,
        embeddings=vectors,
        total_duration=int((time.perf_counter() - started) * NS),
        load_duration=0,
        prompt_eval_count=tokens,
    )


@router.post("/embeddings", summary="Embed one text, the older way", responses=failures(400, 404, 413, 503, 504))
async def embed_text(request: Request, asked: EmbeddingsRequest) -> OneEmbedding:
    vectors, _ = await embedded(request, asked.model, [asked.prompt] if asked.prompt else [])
    return OneEmbedding(embedding=list(chain(*vectors)))


async def embedded(
    request: Request, model: str, texts: Sequence[str], asked: EmbedRequest | None = None
) -> tuple[list[list[float]], int]:
    """Return the vectors of texts, and the number of tokens read. Raises ApiError."""
    service = service_of(request)
    name = served_name(service, model)
    if not texts:  # Ollama loads the model
        service.check_model(name, service.embedding_model)
        return [], 0
    dimensions, truncate = (asked.dimensions, asked.truncate) if asked else (None, None)
    # An empty text gets the vector of a blank, since embedders take no empty text.
    inputs = [text or " " for text in texts]
    told = checked(EmbeddingRequest, model=name, input=inputs, dimensions=dimensions, truncate=truncate is not False)
    vectors, tokens = await embed(request, told)
    return await service.in_thread(vectors.tolist), tokens


# Models


@router.get("/tags", summary="The models", responses=failures())
async def list_models(service: ServiceParam) -> ModelEntries:
    return ModelEntries(models=entries(service))


@router.get("/ps", summary="The models that are loaded: all", responses=failures())
async def list_loaded(service: ServiceParam) -> ModelEntries:
    longest = service.kb.lm.max_positions
    more = {"expires_at": NEVER, "size_vram": weight_bytes(service), "context_length": longest}
    return ModelEntries(models=[one.model_copy(update=more) for one in entries(service)])


@router.post("/show", summary="One model", responses=failures(400, 404, 413))
async def show_model(service: ServiceParam, asked: ShowRequest) -> Shown:
    given = asked.model or asked.name
    if given is None:
        raise ApiError(400, "'model' is missing", "missing_required_parameter", "model")
    name, lm = served_name(service, given), service.kb.lm
    embeds = name == service.embedding_model
    if not embeds:
        service.retrieves(name)
    template = str(lm.tokenizer.chat_template or "")
    capabilities = ["completion", "tools" if "tools" in template else "", thinking_of(lm.tokenizer) and "thinking"]
    family = str(lm.config.model_type)
    about: dict[str, Any] = {"general.architecture": family}
    if embeds:
        about = {"general.architecture": EMBEDDER, f"{EMBEDDER}.embedding_length": service.kb.embedder.dimension}
    else:
        about |= {"general.parameter_count": parameters(service), f"{family}.context_length": lm.max_positions}
    return Shown(
        modelfile="",
        parameters="",
        template="" if embeds else template,
        details=details(service, embeds=embeds),
        model_info=about,
        capabilities=["embedding"] if embeds else [one for one in capabilities if one],
        modified_at=started(service),
    )


@router.get("/version", summary="The version of Ollama's API", responses=failures())
async def version() -> Version:
    return Version(version=API_VERSION)


def entries(service: Service) -> list[ModelEntry]:
    digest = service.kb.lm.fingerprint
    return [
        ModelEntry(
            name=name if ":" in name else name + LATEST,
            model=name if ":" in name else name + LATEST,
            modified_at=started(service),
            size=0 if name == service.embedding_model else weight_bytes(service),
            digest="" if name == service.embedding_model else digest,
            details=details(service, embeds=name == service.embedding_model),
        )
        for name in (service.chat_model, service.plain_model, service.embedding_model)
    ]


def started(service: Service) -> str:
    return datetime.fromtimestamp(service.created, UTC).isoformat().replace("+00:00", "Z")


def weight_bytes(service: Service) -> int:
    lm = service.kb.lm
    return sum(one.nbytes for one in lm.model.parameters()) if isinstance(lm, LanguageModel) else 0


def parameters(service: Service) -> int:
    lm = service.kb.lm
    return sum(one.numel() for one in lm.model.parameters()) if isinstance(lm, LanguageModel) else 0


def details(service: Service, *, embeds: bool) -> Details:
    lm = service.kb.lm
    family = EMBEDDER if embeds else str(lm.config.model_type)
    return Details(
        parent_model="",
        format="",
        family=family,
        families=[family],
        parameter_size="" if embeds else f"{parameters(service) / 1e6:.0f}M",
        quantization_level="" if embeds else str(getattr(lm, "dtype", "")).removeprefix("torch."),
    )
