"""POST /v1/completions, /tokenize: raw prompts."""

from __future__ import annotations

import math
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ragcache import Answer, Done, Token
from ragcache.engine.answer import Event
from ragcache.server.answers import dearest, each_of, read_options, text_logprobs, usage_of
from ragcache.server.body import read_json, request_body
from ragcache.server.chat import Writer, reason_of, respond
from ragcache.server.chat_types import (
    ChatExtension,
    CompletionRequest,
    TextChoice,
    TextCompletion,
    TokenizeRequest,
    TokenList,
)
from ragcache.server.http_errors import errors, streamed
from ragcache.server.service import Service, service_of
from ragcache.server.wire import AnswerModel

router = APIRouter(tags=["answers"])


@router.post(
    "/v1/completions",
    summary="Continue a raw prompt, as it stands",
    responses={
        200: streamed(TextCompletion, "The text; with stream: true, events whose data are TextCompletion"),
        **errors(400, 404, 413, 415, 503, 504),
    },
    openapi_extra=request_body(json=CompletionRequest),
)
async def create_completion(request: Request) -> Response:
    service = service_of(request)
    asked = await read_json(request, CompletionRequest)
    service.retrieves(asked.model)
    options = read_options(asked, service.settings.answers, service.kb.lm.max_positions)
    events = [service.kb.astream_completion(asked.text, **one) for one in each_of(options, asked.n)]
    return await respond(TextWriter(service, request, asked.model), asked, events, asked.extension.timeout_s)


@dataclass
class TextWriter(Writer):
    """Writes answers in the shapes of OpenAI's older API. written: characters of each answer's tokens so far"""

    id: str = field(default_factory=lambda: f"cmpl-{uuid.uuid4().hex}")
    written: Counter[int] = field(default_factory=Counter)

    def completion(self, answers: Sequence[Answer]) -> AnswerModel:
        choices = [
            TextChoice(
                index=index,
                text=answer.text,
                logprobs=None if answer.logprobs is None else text_logprobs(answer.logprobs),
                finish_reason=reason_of(answer),
            )
            for index, answer in enumerate(answers)
        ]
        costs = ChatExtension(**self.costs(dearest(answers)))
        return self.event(choices, usage=usage_of(answers), ragcache=costs)

    def piece(self, index: int, one: Event) -> TextChoice:
        added = one if isinstance(one, Token) else Token("")
        logprobs = text_logprobs(added.logprobs, self.written[index]) if added.logprobs else None
        self.written[index] += sum(len(token.text) for token in added.logprobs)
        reason = reason_of(one.answer) if isinstance(one, Done) else None
        return TextChoice(index=index, text=added.text, logprobs=logprobs, finish_reason=reason)

    def event(self, choices: list[Any], **more: Any) -> AnswerModel:
        return TextCompletion(object="text_completion", choices=choices, **more, **self.common())


@router.post(
    "/tokenize",
    summary="Token ids of a text, by the language model's tokenizer",
    responses={200: {"model": TokenList}, **errors(400, 404, 413, 415)},
    openapi_extra=request_body(json=TokenizeRequest),
)
async def tokenize(request: Request) -> Response:
    service = service_of(request)
    asked = await read_json(request, TokenizeRequest)
    if asked.model is not None:
        service.check_model(asked.model, service.chat_model)
    tokens = await service.in_thread(_tokens, service, asked)
    return TokenList(count=len(tokens), max_model_len=service.kb.lm.max_positions, tokens=tokens).to_response()


def _tokens(service: Service, asked: TokenizeRequest) -> list[int]:
    special = asked.content is None if asked.add_special_tokens is None else asked.add_special_tokens
    return list(service.kb.lm.tokenizer.encode(asked.text, add_special_tokens=special))
