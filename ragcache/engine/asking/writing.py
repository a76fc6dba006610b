"""Answers: from the prompt that was read to their last token."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import Literal

from ragcache.engine.answer import Event, Token, TokenLogprob
from ragcache.engine.asking.reading import OpenQuestion
from ragcache.models.card import ModelCard
from ragcache.models.decoding import TextStream
from ragcache.models.sampling import Sampling, TokenScores
from ragcache.prompt import control_tokens, encode_text


@dataclass
class AnswerSoFar:
    """An answer so far.

    ids:         its tokens
    has_run_all: whether the last one has run: where the reader ends an answer, that is chance
    is_cut:      whether its text ends before its tokens do, at a stop string
    scores:      log-probabilities of its tokens, if asked for; those of tokens to come may be among them
    logprobs:    the same of its tokens, with their texts
    """

    text: str = ""
    ids: list[int] = field(default_factory=list)
    has_run_all: bool = False
    is_cut: bool = False
    finish: Literal["stop", "length"] = "length"
    scores: list[TokenScores] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)

    @property
    def run_ids(self) -> list[int]:
        """Tokens whose KV is in the cache."""
        return self.ids if self.has_run_all else self.ids[:-1]

    def said(self, card: ModelCard) -> list[int]:
        """Ids that the next turn reads as this answer: its tokens, where they are its text and nothing else."""
        specials = control_tokens(card.tokenizer, special_only=True)
        if self.is_cut or not specials.keys().isdisjoint(self.ids):
            return encode_text(card.tokenizer, self.text)
        return self.ids

    def told(self, sampling: Sampling) -> tuple[TokenLogprob, ...] | None:
        """`Answer.logprobs`."""
        return None if sampling.logprobs is None else tuple(self.logprobs)

    def add(self, card: ModelCard, token: int) -> None:
        """Take the next token."""
        before = self.ids[-1:]
        self.ids.append(token)
        if len(self.scores) >= len(self.ids):
            scores = self.scores[len(self.ids) - 1]
            top = tuple(TokenLogprob(id, _text(card, before, id), logprob) for id, logprob in scores.top)
            self.logprobs.append(TokenLogprob(token, _text(card, before, token), scores.logprob, top))


def _text(card: ModelCard, before: list[int], token: int) -> str:
    """What a token adds to the text behind the one before: tokenizers drop the space of a text's first word."""
    head, whole, alone = (
        str(card.tokenizer.decode(ids, clean_up_tokenization_spaces=False))
        for ids in (before, [*before, token], [token])
    )
    return (whole[len(head) :] if whole.startswith(head) else "") or alone


def write(
    card: ModelCard, asked: OpenQuestion, steps: Generator[int, None, None], most: int, written: AnswerSoFar
) -> Iterator[Event]:
    """Write the answer whose tokens `steps` gives, `most` of them at most, into `written`. `steps` is closed when this
    ends."""
    pieces, told = TextStream(card.tokenizer, asked.reading.sampling.stop), 0
    try:
        for token in steps:
            asked.clock.first_token()
            written.add(card, token)
            if piece := pieces.push(token):
                written.text += piece
                yield Token(piece, tuple(written.logprobs[told:]))
                told = len(written.logprobs)
            if pieces.stopped:
                written.is_cut = True
                break
        else:
            written.has_run_all = True
        written.finish = "stop" if written.is_cut or len(written.ids) < most else "length"
        piece, left = pieces.finish(), tuple(written.logprobs[told:])
        if piece or left:
            written.text += piece
            yield Token(piece, left)
    finally:
        steps.close()
