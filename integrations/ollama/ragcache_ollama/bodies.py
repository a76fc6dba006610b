"""Bodies of Ollama's API and its responses. Fields without effect are accepted; unknown fields give a warning."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Field, JsonValue, Tag, WithJsonSchema

from ragcache.engine.options import AnswerDefaults
from ragcache.server import chat_types
from ragcache.server.body import checked
from ragcache.server.embeddings import MAX_INPUTS
from ragcache.server.http_errors import ApiError
from ragcache.server.wire import AnswerModel, JsonObject, LooseModel, Name, RequestModel, Text

LEVELS = ("low", "medium", "high")


def _level(said: bool | str | None) -> bool | str | None:
    if isinstance(said, str) and said not in ("", *LEVELS):
        raise ValueError(f"it is {said[:40]!r}; say true, false, {', '.join(LEVELS)}")
    return said


def _no_images(given: list[JsonValue] | None) -> None:
    if given:
        raise ValueError("the model reads no images; send text alone")


def _no_context(given: list[JsonValue] | None) -> None:
    if given:
        raise ValueError("token ids of earlier answers are not read; send the conversation as messages to /api/chat")


def _no_template(given: str | None) -> None:
    if given:
        raise ValueError("the model's own chat template is used; leave it out, or send the whole prompt with raw")


LEVEL: dict[str, Any] = {"anyOf": [{"type": "boolean"}, {"enum": ["", *LEVELS], "type": "string"}, {"type": "null"}]}
Think = Annotated[bool | str | None, AfterValidator(_level), WithJsonSchema(LEVEL)]
NoImages = Annotated[list[JsonValue] | None, AfterValidator(_no_images)]
NoContext = Annotated[list[JsonValue] | None, AfterValidator(_no_context)]


class Options(RequestModel):
    """Options of an answer. num_predict: most tokens of the answer; 0 and below: until it ends. seed: -1 means no seed.
    The last three fields are sent by LangChain and LlamaIndex and have no effect: the model is loaded already."""

    num_predict: Annotated[int, Field(ge=-2, le=2**31 - 1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: chat_types.SeedInt | None = None
    stop: chat_types.StopText | Annotated[list[chat_types.StopText], Field(max_length=16)] | None = None
    repeat_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    presence_penalty: chat_types.Penalty | None = None
    frequency_penalty: chat_types.Penalty | None = None

    num_ctx: JsonValue = None
    num_gpu: JsonValue = None
    num_thread: JsonValue = None

    def sampling(self) -> dict[str, Any]:
        """Return the sampling options by OpenAI's and vLLM's names. A top_p of 0 leaves only the likeliest token,
        as 1e-6 does.
        """
        same = ("temperature", "top_k", "min_p", "stop", "presence_penalty", "frequency_penalty")
        longest = self.num_predict if self.num_predict and self.num_predict > 0 else None
        top_p = None if self.top_p is None else max(self.top_p, 1e-6)
        seed = None if self.seed == -1 else self.seed
        own = {"max_tokens": longest, "repetition_penalty": self.repeat_penalty, "top_p": top_p, "seed": seed}
        return {name: getattr(self, name) for name in same} | own

    def defaults(self, own: AnswerDefaults) -> AnswerDefaults:
        """Return the server's defaults for the other options, without max_tokens or seed if the request disables
        these.
        """
        own = replace(own, max_tokens=None) if self.num_predict is not None and self.num_predict < 1 else own
        return replace(own, seed=None) if self.seed == -1 else own


class AnswerRequest(RequestModel):
    """Fields of both kinds of requests for an answer.

    think: whether, or how much, the model thinks before it answers
    format: "json", or a schema that the answer matches
    ragcache: as in the server's own API
    """

    model: Name
    stream: bool | None = None
    format: Literal["", "json"] | JsonObject | None = None
    options: Options | None = None
    keep_alive: JsonValue = None
    think: Think = None
    logprobs: bool | None = None
    top_logprobs: chat_types.LikeliestCount | None = None
    ragcache: chat_types.Extension | None = None

    def defaults(self, own: AnswerDefaults) -> AnswerDefaults:
        return (self.options or Options()).defaults(own)

    @property
    def streams(self) -> bool:
        return self.stream is not False

    def as_chat(
        self, model: str, messages: Sequence[chat_types.Message], tools: Sequence[chat_types.Tool], *, thinks: bool
    ) -> chat_types.ChatRequest:
        """Return the request in OpenAI's form. thinks: whether the model can think. Raises ApiError."""
        if self.think and not thinks:
            raise ApiError(400, f"{self.model!r} does not support thinking; leave think out", "invalid_value", "think")
        extension = self.ragcache or chat_types.Extension()
        if isinstance(self.think, bool) and thinks:
            extension = extension.model_copy(update={"enable_thinking": self.think})
        likely = {"logprobs": True, "top_logprobs": self.top_logprobs or 0} if self.logprobs else {}
        return checked(
            chat_types.ChatRequest,
            model=model,
            messages=list(messages),
            tools=list(tools) or None,
            stream=self.streams,
            response_format=self._format(),
            reasoning_effort=self.think if isinstance(self.think, str) and self.think else None,
            ragcache=extension,
            **likely,
            **(self.options or Options()).sampling(),
        )

    def _format(self) -> chat_types.JsonFormat | chat_types.SchemaFormat | None:
        if not self.format:
            return None
        if self.format == "json":
            return chat_types.JsonFormat(type="json_object")
        schema = chat_types.JsonSchema.model_validate({"name": "format", "schema": self.format})
        return chat_types.SchemaFormat(type="json_schema", json_schema=schema)


class Function(LooseModel):
    name: Text
    arguments: JsonObject = Field(default_factory=dict)


class Call(LooseModel):
    id: Name | None = None
    function: Function


class Turn(LooseModel):
    """A message. tool_name, tool_call_id: the call whose result a message of role `tool` holds"""

    role: Literal["system", "user", "assistant", "tool"]
    content: Text | None = None
    images: NoImages = None
    tool_calls: list[Call] | None = None
    tool_name: Text | None = None
    tool_call_id: Text | None = None


class OllamaTool(chat_types.Tool):
    type: Literal["function"] = "function"


class OllamaChatRequest(AnswerRequest):
    messages: Annotated[list[Turn], Field(max_length=10_000)] = Field(default_factory=list)
    tools: Annotated[list[OllamaTool], Field(max_length=chat_types.MAX_TOOLS)] | None = None


def messages_of(turns: Sequence[Turn]) -> list[chat_types.Message]:
    """Return the turns in OpenAI's form, in which each result has the id of its call.

    A result without an id belongs to the first unanswered call of its function. Raises ApiError for a result without a
    call.
    """
    found: list[chat_types.Message] = []
    waiting: list[chat_types.Called] = []
    for rank, turn in enumerate(turns):
        calls = [
            chat_types.Called(id=call.id or f"call_{rank}_{number}", function=_written(call.function))
            for number, call in enumerate(turn.tool_calls or ())
        ]
        waiting += calls
        more: dict[str, Any] = {"tool_calls": calls} if calls else {}
        if turn.role == "tool":
            answered = next((call for call in waiting if _answers(turn, call)), None)
            if answered is None:
                place = f"messages[{rank}]"
                message = f"{place} answers no call; send the assistant's tool_calls, too"
                raise ApiError(400, message, "invalid_value", place)
            waiting.remove(answered)
            more["tool_call_id"] = answered.id
        found.append(checked(chat_types.Message, role=turn.role, content=turn.content or "", **more))
    return found


def _written(function: Function) -> chat_types.CalledFunction:
    return chat_types.CalledFunction(name=function.name, arguments=json.dumps(function.arguments, ensure_ascii=False))


def _answers(turn: Turn, call: chat_types.Called) -> bool:
    return turn.tool_call_id == call.id if turn.tool_call_id else turn.tool_name in (None, "", call.function.name)


class GenerateRequest(AnswerRequest):
    """A prompt. raw: read the prompt as it is, without template and passages. The last four fields must be empty."""

    prompt: Text | None = None
    system: Text | None = None
    raw: bool | None = None

    suffix: Literal[""] | None = None
    template: Annotated[Text | None, AfterValidator(_no_template)] = None
    images: NoImages = None
    context: NoContext = None

    @property
    def unlike_raw(self) -> list[str]:
        """Return the requested options that a raw prompt has no place for."""
        asked = [name for name in ("system", "think") if getattr(self, name)]
        given = self.ragcache.model_fields_set if self.ragcache else ()
        return asked + [
            f"ragcache.{name}" for name in (*chat_types.RetrieveFields.model_fields, "documents") if name in given
        ]


class EmbedRequest(RequestModel):
    """Texts to embed. truncate: whether a text that is too long is embedded in windows; if false, it is refused"""

    model: Name
    input: Annotated[
        Annotated[Text, Tag("Text")] | Annotated[list[Text], Field(max_length=MAX_INPUTS), Tag("Texts")],
        Discriminator(lambda given: "Texts" if isinstance(given, list) else "Text"),
    ]
    truncate: bool | None = None
    dimensions: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    options: Options | None = None
    keep_alive: JsonValue = None


class ShowRequest(RequestModel):
    """A model to show. name: the field of older clients for `model`"""

    model: Name | None = None
    name: Name | None = None
    verbose: bool | None = None


class OllamaError(AnswerModel):
    error: str = Field(description="What is wrong and how to get out of it")


class AnswerFunction(AnswerModel):
    name: str
    arguments: dict[str, JsonValue]


class AnswerCall(AnswerModel):
    id: str
    function: AnswerFunction


class AnswerTurn(AnswerModel):
    role: Literal["assistant"]
    content: str
    thinking: str = ""
    tool_calls: list[AnswerCall] = Field(default_factory=list)


class Part(AnswerModel):
    """An answer, or one line of its stream. Chats have `message`, prompts `response` and `thinking`. The last line has
    the counts of tokens, and times in nanoseconds."""

    model: str
    created_at: str
    done: bool
    message: AnswerTurn | None = None
    response: str = ""
    thinking: str = ""
    logprobs: list[chat_types.ScoredToken] = Field(default_factory=list)
    done_reason: Literal["stop", "length", "load", "unload"] = "stop"
    total_duration: int = 0
    load_duration: int = 0
    prompt_eval_count: int = 0
    prompt_eval_duration: int = 0
    eval_count: int = 0
    eval_duration: int = 0
    ragcache: chat_types.ChatExtension = chat_types.ChatExtension()


class Embeddings(AnswerModel):
    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class Details(AnswerModel):
    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class ModelEntry(AnswerModel):
    """A model. size: bytes of the weights in memory; 0 if unknown. Only a loaded model has the last three fields."""

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: Details
    expires_at: str = ""
    size_vram: int = 0
    context_length: int = 0


class ModelEntries(AnswerModel):
    models: list[ModelEntry]


class Shown(AnswerModel):
    modelfile: str
    parameters: str
    template: str
    details: Details
    model_info: dict[str, JsonValue]
    capabilities: list[str]
    modified_at: str


class Version(AnswerModel):
    version: str
