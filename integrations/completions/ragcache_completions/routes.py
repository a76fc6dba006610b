"""POST /v1/completions and /tokenize, for raw prompts."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, product
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ragcache import Answer, Done, Token
from ragcache.engine.answer import Event, TokenLogprob
from ragcache.server.answers import dearest, each_of, number_of, read_options, usage_of
from ragcache.server.body import JsonRoute
from ragcache.server.chat import EXPLAINS, Writer, reason_of, respond
from ragcache.server.chat_types import ChatExtension
from ragcache.server.http_errors import errors, streamed
from ragcache.server.service import Service, ServiceParam
from ragcache.server.wire import AnswerModel
from ragcache_completions import bodies

router = APIRouter(route_class=JsonRoute, tags=["answers"])


@router.post(
    "/v1/completions",
    dependencies=[EXPLAINS],
    summary="Continue a raw prompt, as it stands",
    responses={
        200: streamed(bodies.TextCompletion, "The text; with stream: true, events", bodies.TextCompletion),
        **errors(400, 404, 413, 415, 503, 504),
    },
)
async def create_completion(request: Request, service: ServiceParam, asked: bodies.CompletionRequest) -> Response:
    service.retrieves(asked.model)
    options = read_options(asked, service.settings.answers, service.kb.lm.max_positions)
    each = product(asked.prompts, each_of(options, asked.n))
    events = [service.kb.astream_completion(prompt, **one) for prompt, one in each]
    writer = TextWriter(service, request, asked.model, prompts=len(asked.prompts))
    return await respond(writer, asked, events, asked.extension.timeout_s)


@dataclass
class TextWriter(Writer):
    """Writes answers in the format of OpenAI's older API.

    written: by the index of an answer, characters of its tokens so far
    """

    id: str = field(default_factory=lambda: f"cmpl-{uuid.uuid4().hex}")
    written: Counter[int] = field(default_factory=Counter)

    def completion(self, answers: Sequence[Answer]) -> AnswerModel:
        choices = [
            bodies.TextChoice(
                index=index,
                text=answer.text,
                logprobs=None if answer.logprobs is None else text_logprobs(answer.logprobs),
                finish_reason=reason_of(answer),
            )
            for index, answer in enumerate(answers)
        ]
        costs = ChatExtension(**self.costs(dearest(answers)))
        return self.event(choices, usage=usage_of(answers, self.prompts), ragcache=costs)

    def piece(self, index: int, one: Event) -> bodies.TextChoice:
        added = one if isinstance(one, Token) else Token("")
        logprobs = text_logprobs(added.logprobs, self.written[index]) if added.logprobs else None
        self.written[index] += sum(len(token.text) for token in added.logprobs)
        reason = reason_of(one.answer) if isinstance(one, Done) else None
        return bodies.TextChoice(index=index, text=added.text, logprobs=logprobs, finish_reason=reason)

    def event(self, choices: list[Any], **more: Any) -> AnswerModel:
        return bodies.TextCompletion(object="text_completion", choices=choices, **more, **self.common())


def text_logprobs(tokens: Sequence[TokenLogprob], offset: int = 0) -> bodies.TextLogprobs:
    """Return the tokens' log-probabilities. `top_logprobs` holds the chosen token too, whatever its rank.

    offset: position in the answer's text where the first token begins
    """
    texts = [token.text for token in tokens]
    return bodies.TextLogprobs(
        tokens=texts,
        token_logprobs=list(map(number_of, tokens)),
        top_logprobs=list(map(_by_text, tokens)),
        text_offset=list(accumulate(map(len, texts), initial=offset))[: len(texts)],
    )


def _by_text(token: TokenLogprob) -> dict[str, float]:
    """Return the chosen token and the likeliest tokens by text. Of two tokens with the same text the second is
    named by its id.
    """
    found = {token.text: number_of(token)}
    for near in token.top:
        if near.id != token.id:
            found[f"token_id:{near.id}" if near.text in found else near.text] = number_of(near)
    return found


@router.post(
    "/tokenize", summary="Token ids of a text, by the language model's tokenizer", responses=errors(400, 404, 413, 415)
)
async def tokenize(service: ServiceParam, asked: bodies.TokenizeRequest) -> bodies.TokenList:
    if asked.model is not None:
        service.retrieves(asked.model)
    tokens = await service.in_thread(_tokens, service, asked)
    return bodies.TokenList(count=len(tokens), max_model_len=service.kb.lm.max_positions, tokens=tokens)


def _tokens(service: Service, asked: bodies.TokenizeRequest) -> list[int]:
    service.kb.lm.check_text(asked.text, "the prompt")
    special = asked.content is None if asked.add_special_tokens is None else asked.add_special_tokens
    return list(service.kb.lm.tokenizer.encode(asked.text, add_special_tokens=special))
