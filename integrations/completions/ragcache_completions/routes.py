"""POST /v1/completions and /tokenize, for raw prompts."""

from __future__ import annotations

import math
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from itertools import accumulate, product
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ragcache import Answer, Done, RagCache, Sources, Timings, Token, Usage
from ragcache.engine.admission import Size, kv_bytes
from ragcache.engine.answer import Event, TokenLogprob
from ragcache.engine.conversation import completion_ends
from ragcache.engine.output import token_logprob
from ragcache.errors import ConfigError
from ragcache.models.deadline import LIMIT
from ragcache.models.language_model import LanguageModel
from ragcache.models.sampler import TokenScores, token_scores
from ragcache.runtime import team_ends
from ragcache.server.answers import dearest, each_of, number_of, read_options, usage_of
from ragcache.server.body import JsonRoute
from ragcache.server.chat import EXPLAINS, Writer, reason_of, respond
from ragcache.server.chat_types import ChatExtension
from ragcache.server.http_errors import errors, streamed
from ragcache.server.service import Service, ServiceParam
from ragcache.server.wire import AnswerModel
from ragcache_completions import bodies

router = APIRouter(route_class=JsonRoute, tags=["answers"])
# Tokens of a prompt whose logits are in memory at once: 40 MB for a vocabulary of 150,000.
PIECE = 64


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
    scored = asked.echo and asked.max_tokens == 0  # without an answer, but options are checked all the same
    told = asked.model_copy(update={"max_tokens": 1}) if scored else asked
    options = read_options(told, service.settings.answers, service.kb.lm.max_positions)
    events: list[AsyncIterator[Event]] = []
    for prompt, one in product(asked.prompts, each_of(options, asked.n)):
        answer = service.kb.astream_completion(prompt, **one)
        events.append(_echoed(service, prompt, asked, answer) if asked.echo else answer)
    writer = TextWriter(service, request, asked.model, prompts=len(asked.prompts))
    return await respond(writer, asked, events, asked.extension.timeout_s)


async def _echoed(
    service: Service, prompt: str | list[int], asked: bodies.CompletionRequest, events: AsyncIterator[Event]
) -> AsyncGenerator[Event, None]:
    """Yield an answer's events with the prompt before its text; with max_tokens 0 only the prompt."""
    logprobs = asked.logprobs
    tokens = await service.limited(score, service.kb, prompt, logprobs)
    text = prompt if isinstance(prompt, str) else "".join(token.text for token in tokens)
    scored = tuple(tokens) if logprobs is not None else ()
    events = _unanswered(len(tokens), logprobs) if asked.max_tokens == 0 else events
    async with aclosing(events) as open_events:  # type: ignore[type-var]
        async for one in open_events:
            if isinstance(one, Done):
                both = None if one.answer.logprobs is None else (*scored, *one.answer.logprobs)
                one = Done(replace(one.answer, text=text + one.answer.text, logprobs=both))
            yield one
            if isinstance(one, Sources):
                yield Token(text, scored)


async def _unanswered(tokens: int, logprobs: int | None) -> AsyncGenerator[Event, None]:
    """Yield the events of an empty answer to a prompt of so many tokens."""
    yield Sources([], "full")
    usage, scores = Usage(tokens, 0, 0, computed_tokens=tokens), None if logprobs is None else ()
    yield Done(Answer("", [], Timings(*[0.0] * 8), usage, "full", finish_reason="length", logprobs=scores))


@team_ends()
def score(kb: RagCache, prompt: str | list[int], logprobs: int | None) -> list[TokenLogprob]:
    """Return the tokens of a raw prompt, each with its log-probability after the tokens before it (all NaN if
    `logprobs` is None). They are computed by a pass of the whole prompt, which reads nothing that is stored.

    Raises the errors of reading a prompt, and CancelledError by `LIMIT`.
    """
    lm = kb.lm
    if isinstance(prompt, str):
        lm.check_text(prompt, "the prompt")
    ids = list(completion_ends(lm.tokenizer, prompt)[0].suffix_ids)
    lm.check_ids(ids, "the prompt")
    scores = [TokenScores(math.nan, ())] * len(ids)
    if logprobs is not None:
        scores[1:] = _scores(kb, ids, logprobs)
    found = [token_logprob(lm, ids[max(0, rank - 1) : rank], id, scores[rank]) for rank, id in enumerate(ids)]
    bos = str(lm.tokenizer.bos_token or "")
    if isinstance(prompt, str) and found[0].text == bos and not prompt.startswith(bos):  # not part of the text
        found[0] = replace(found[0], text="")
    return found


def _scores(kb: RagCache, ids: Sequence[int], logprobs: int) -> Iterator[TokenScores]:
    """Yield the scores of the second and later tokens."""
    lm = kb.lm
    if not isinstance(lm, LanguageModel):
        raise ConfigError("logprobs of a prompt (echo) need the model in this process; leave one of them out", "echo")
    size = Size(len(ids), kv_bytes(lm, len(ids)))
    claim = kb.admission.reserve(lambda: size, LIMIT.get())
    cache = lm.new_cache(len(ids))
    try:
        for start in range(0, len(ids), PIECE):
            piece = ids[start : start + PIECE]
            logits = lm.run(piece, start, cache, num_logits=len(piece))
            for row, following in zip(logits, ids[start + 1 : start + 1 + PIECE], strict=False):
                yield token_scores(row, following, logprobs)
    finally:
        cache.release()
        kb.admission.end(claim)
        kb.admission.release(claim.num_bytes)


@dataclass
class TextWriter(Writer):
    """Writes answers in the format of OpenAI's older API. written: characters of each answer's tokens so far"""

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
    """Return the tokens' log-probabilities. The chosen token is among the likeliest, whatever its rank.

    offset: where the first token's text begins
    """
    texts = [token.text for token in tokens]
    return bodies.TextLogprobs(
        tokens=texts,
        token_logprobs=[None if math.isnan(token.logprob) else number_of(token) for token in tokens],
        top_logprobs=[None if math.isnan(token.logprob) else _by_text(token) for token in tokens],
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
