"""Conversion between OpenAI's chat format and the engine's: a request to a call, an answer to response objects."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import PurePath
from typing import Any, NamedTuple

from pydantic import JsonValue

from ragcache import Answer, Chunk, GenerationOptions, Passage, RagCache, RetrieveOptions, Sampling, Source
from ragcache.engine.answer import TokenLogprob, sources_to_json
from ragcache.engine.options import AnswerDefaults, names
from ragcache.server import chat_types

# Options of the engine that a request can set by name. `sampling` is made of OpenAI's fields, `cancelled` is set when a
# client hangs up, and `Work` applies `timeout_s`, which includes the wait for a slot.
READ = [name for name in names(GenerationOptions) if name not in ("sampling", "cancelled", "timeout_s")]


class Call(NamedTuple):
    """Arguments of `RagCache.stream_chat`."""

    messages: list[dict[str, Any]]
    options: dict[str, Any]


def engine_call(
    request: chat_types.ChatRequest, defaults: AnswerDefaults, max_positions: int, *, retrieves: bool = True
) -> Call:
    """Return the engine call for a chat request.

    max_positions: most tokens of a prompt with its answer; a request for a longer answer is limited to them
    retrieves: whether to retrieve passages if the request does not say

    Raises ConfigError for invalid sampling options.
    """
    extension = request.extension
    options = {
        "sampling": sampling(request, defaults, max_positions),
        **_given(READ, extension, defaults),
        **request.model_dump(include=set(chat_types.TemplateFields.model_fields), exclude_none=True),
        "context": extension.context or ("last" if extension.documents is not None else defaults.context),
        "drop_turns": defaults.drop_turns if extension.drop_turns is None else extension.drop_turns,
        **_passages(extension, defaults, retrieves),
        **_tools(request),
    }
    return Call(turns(request.messages), options)


def turns(messages: Sequence[chat_types.Message]) -> list[dict[str, Any]]:
    """Return messages with role, text and tool calls. System messages at the beginning are joined, as chat templates
    expect.
    """
    found: list[dict[str, Any]] = []
    for message in messages:
        role = "system" if message.role == "developer" else message.role
        if role == "system" and len(found) == 1 and found[0]["role"] == "system":
            found[0]["content"] += f"\n\n{message.text}"
        else:
            calls = [call.model_dump() for call in message.tool_calls or ()]
            found.append({"role": role, "content": message.text})
            if calls:
                found[-1]["tool_calls"] = calls
            if message.tool_call_id is not None:
                found[-1]["tool_call_id"] = message.tool_call_id
    return found


def _tools(request: chat_types.ChatRequest) -> dict[str, Any]:
    """Return the options about tools. `strict` is left out, because it is not part of the prompt."""
    if not request.tools and request.tool_choice in (None, "auto", "none"):
        return {}
    choice, unsaid = request.tool_choice, {"function": {"strict"}}
    return {
        "tools": [tool.model_dump(exclude_none=True, exclude=unsaid) for tool in request.tools or ()],
        "tool_choice": choice.function.name if isinstance(choice, chat_types.NamedTool) else choice,
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "tool_format": request.extension.tool_format,
    }


def sampling(request: chat_types.SampledRequest, defaults: AnswerDefaults, max_positions: int) -> Sampling:
    """Return the sampling options of a request. Raises ConfigError for invalid values."""
    stop = _first(request.stop, defaults.stop)
    top_k = _first(request.top_k, request.extension.top_k, defaults.top_k)
    completion_tokens = request.max_completion_tokens if isinstance(request, chat_types.ChatRequest) else None
    most = _first(completion_tokens, request.max_tokens, defaults.max_tokens)
    return Sampling(
        max_tokens=None if most is None else min(most, max_positions),
        temperature=_first(request.temperature, defaults.temperature),
        top_p=_first(request.top_p, defaults.top_p),
        top_k=None if top_k in (0, -1) else top_k,
        seed=_first(request.seed, defaults.seed),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        json_schema=_schema(request.response_format) if isinstance(request, chat_types.ChatRequest) else None,
        min_p=request.min_p,
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        repetition_penalty=_first(request.repetition_penalty, 1.0),
        logit_bias={int(id): bias for id, bias in (request.logit_bias or {}).items()},
        stop_token_ids=tuple(request.stop_token_ids or ()),
        logprobs=request.likeliest,
    )


def each_of(options: dict[str, Any], n: int | None) -> Iterator[dict[str, Any]]:
    """Yield the options of each of n answers to a question. A given seed is raised by 1 for each answer, as in vLLM."""
    sampling: Sampling = options["sampling"]
    for index in range(n or 1):
        seed = None if sampling.seed is None else sampling.seed + index
        yield {**options, "sampling": replace(sampling, seed=seed)}


def _schema(
    response_format: chat_types.PlainFormat | chat_types.JsonFormat | chat_types.SchemaFormat | None,
) -> dict[str, Any] | None:
    if isinstance(response_format, chat_types.JsonFormat):
        return {"type": "object"}
    return response_format.json_schema.schema_ if isinstance(response_format, chat_types.SchemaFormat) else None


def _passages(extension: chat_types.Extension, defaults: AnswerDefaults, retrieves: bool) -> dict[str, Any]:
    """Return the request's documents, the arguments of a retrieval, or nothing."""
    if extension.documents is not None:
        return {"passages": [_passage(document) for document in extension.documents]}
    return retrieval(extension, defaults) if _first(extension.retrieve, retrieves) else {}


def retrieval(fields: chat_types.RetrieveFields, defaults: AnswerDefaults) -> dict[str, Any]:
    """Return the arguments of `RagCache.retrieve`."""
    return {"k": _first(fields.k, defaults.k), **_given(names(RetrieveOptions), fields, defaults)}


def read_options(request: chat_types.SampledRequest, defaults: AnswerDefaults, max_positions: int) -> dict[str, Any]:
    """Return the arguments of `RagCache.stream_completion`; see `engine_call`."""
    return {"sampling": sampling(request, defaults, max_positions), **_given(READ, request.extension, defaults)}


def _given(
    options: Iterable[str], fields: chat_types.RetrieveFields | chat_types.ReadFields, defaults: AnswerDefaults
) -> dict[str, Any]:
    """Return options that the request or the server's defaults set; the engine has defaults for the rest."""
    found = {name: _first(getattr(fields, name), getattr(defaults, name, None)) for name in options}
    return {name: value for name, value in found.items() if value is not None}


def _passage(document: chat_types.GivenDocument) -> Passage:
    return Passage(document.text, document.id, document.handle, document.score, document.metadata)


def _first(*values: Any) -> Any:
    """Return the first value that is not None."""
    return next((value for value in values if value is not None), None)


def usage_of(answers: Sequence[Answer], prompts: int = 1) -> chat_types.ChatUsage:
    """Return the usage of all answers to a request.

    answers: grouped by prompt, with the same number of answers to each
    prompts: the number of prompts

    Each prompt is counted once: with the cached tokens of the answer that had the fewest, because the other answers to
    the prompt found its KV in memory.
    """
    each = len(answers) // prompts
    read = [dearest(answers[start : start + each]).usage for start in range(0, len(answers), each)]
    prompt_tokens = sum(usage.prompt_tokens for usage in read)
    completion_tokens = sum(answer.usage.completion_tokens for answer in answers)
    return chat_types.ChatUsage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
        prompt_tokens_details=chat_types.PromptTokensDetails(
            cached_tokens=sum(usage.cached_tokens for usage in read), audio_tokens=0
        ),
        completion_tokens_details=chat_types.CompletionTokensDetails(
            reasoning_tokens=sum(answer.usage.reasoning_tokens for answer in answers),
            audio_tokens=0,
            accepted_prediction_tokens=0,
            rejected_prediction_tokens=0,
        ),
    )


def dearest(answers: Sequence[Answer]) -> Answer:
    """Return the answer that had the fewest prompt tokens cached; the others reused the context that it placed."""
    return min(answers, key=lambda answer: answer.usage.cached_tokens)


def sources_of(hits: Sequence[Source]) -> list[chat_types.SourceItem]:
    return [chat_types.SourceItem(**source) for source in sources_to_json(hits)]


def citations(answer: Answer) -> list[dict[str, JsonValue]]:
    """Return the documents of an answer as citations of the Responses API: web pages by their URL, others as files.

    Nothing says which words rest on which document, so each is cited for the whole text.
    """
    found: dict[str, dict[str, JsonValue]] = {}
    end = len(answer.text)
    for chunk in [hit.chunk for hit in answer.hits if end]:
        id, name = _cited(chunk)
        if _is_page(chunk):
            page = dict[str, JsonValue](url=id, title=name, start_index=0, end_index=end)
            found.setdefault(id, {"type": "url_citation", **page})
        elif id:
            found.setdefault(id, {"type": "file_citation", "file_id": id, "filename": name, "index": end})
    return list(found.values())


def _is_page(chunk: Chunk) -> bool:
    return chunk.source.startswith(("http://", "https://"))


def _cited(chunk: Chunk) -> tuple[str, str]:
    """Return the id of a passage's document, and the name that readers see."""
    file = PurePath(chunk.source).name
    titled = chunk.title or file or chunk.document_id or chunk.id
    return (chunk.source, titled) if _is_page(chunk) else (chunk.document_id, file or titled)


def source_event(hits: Sequence[Source]) -> dict[str, Any] | None:
    """Return the passages as an event of Open WebUI, or None if no passage has a name.

    Open WebUI takes the event from any chunk of a stream and shows the passages by document, with their text. A passage
    without a name was found in the prompt, so the client knows its text. Scores are left out, because Open WebUI shows
    them as percentages, which scores of a keyword search or a reranker are not.
    """
    hits = [hit for hit in hits if any(_cited(hit.chunk))]
    if not hits:
        return None
    cited = [_cited(hit.chunk) for hit in hits]
    pages = ({"page": hit.chunk.metadata["page"]} if "page" in hit.chunk.metadata else {} for hit in hits)
    metadata = [{"source": id or name, "name": name, **page} for (id, name), page in zip(cited, pages, strict=True)]
    shown = {"source": metadata[0], "document": [hit.chunk.text for hit in hits], "metadata": metadata}
    return {"type": "source", "data": shown}


def chat_citations(answer: Answer) -> list[JsonValue]:
    """Return the citations in the form of chat completions, which have no file citations."""
    pages = [page for page in citations(answer) if page.pop("type") == "url_citation"]
    return [{"type": "url_citation", "url_citation": page} for page in pages]


def costs_of(answer: Answer, kb: RagCache) -> dict[str, Any]:
    """Return the fields of `ChatExtension` that are known at the end of an answer."""
    usage = answer.usage
    return {
        "prompt_tokens": usage.prompt_tokens,
        "computed_tokens": usage.computed_tokens,
        "created_tokens": usage.created_tokens,
        "avoided_tokens": usage.cached_tokens,
        "method": answer.method,
        "method_reason": answer.method_reason,
        "dropped": answer.dropped,
        "dropped_turns": answer.dropped_turns,
        "timings": chat_types.PhaseSeconds(**asdict(answer.timings)),
        "full_prefill_estimate_s": kb.full_prefill_estimate_s(usage.prompt_tokens),
        "full_prefill_samples": kb.full_prefill_samples,
    }


LEAST = -9999.0  # for minus infinity, which JSON lacks


def chat_logprobs(tokens: Sequence[TokenLogprob]) -> chat_types.ChoiceLogprobs:
    content = [
        chat_types.ScoredToken(**_likely(token).model_dump(), top_logprobs=[_likely(near) for near in token.top])
        for token in tokens
    ]
    return chat_types.ChoiceLogprobs(content=content, refusal=None)


def _likely(token: TokenLogprob) -> chat_types.LikelyToken:
    whole = None if "\ufffd" in token.text else list(token.text.encode())
    return chat_types.LikelyToken(token=token.text, logprob=number_of(token), bytes=whole)


def number_of(token: TokenLogprob) -> float:
    return max(token.logprob, LEAST)
