"""Log-probabilities in OpenAI's two shapes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from ragcache.engine.answer import TokenLogprob
from ragcache.server.schemas.completion import ChoiceLogprobs, LikelyToken, ScoredToken
from ragcache.server.schemas.prompt import TextLogprobs

LEAST = -9999.0  # in place of minus infinity, which JSON has not


def chat_logprobs(tokens: Sequence[TokenLogprob]) -> ChoiceLogprobs:
    content = [
        ScoredToken(**_likely(token).model_dump(), top_logprobs=[_likely(near) for near in token.top])
        for token in tokens
    ]
    return ChoiceLogprobs(content=content, refusal=None)


def text_logprobs(tokens: Sequence[TokenLogprob], offset: int = 0) -> TextLogprobs:
    """offset: where the first token's text begins. The chosen token is among the likeliest, wherever it ranks."""
    texts = [token.text for token in tokens]
    return TextLogprobs(
        tokens=texts,
        token_logprobs=[_number(token) for token in tokens],
        top_logprobs=[{near.text: _number(near) for near in (*token.top, token)} for token in tokens],
        text_offset=list(accumulate(map(len, texts), initial=offset))[: len(texts)],
    )


def _likely(token: TokenLogprob) -> LikelyToken:
    whole = None if "\ufffd" in token.text else list(token.text.encode())
    return LikelyToken(token=token.text, logprob=_number(token), bytes=whole)


def _number(token: TokenLogprob) -> float:
    return max(token.logprob, LEAST)
