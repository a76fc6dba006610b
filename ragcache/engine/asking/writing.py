"""Answers: from the prompt that was read to their last token."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import Literal

from ragcache.engine.answer import Event, Token
from ragcache.engine.asking.reading import OpenQuestion
from ragcache.models.card import ModelCard
from ragcache.models.decoding import TextStream
from ragcache.prompt import control_tokens, encode_text


@dataclass
class AnswerSoFar:
    """An answer so far.

    ids:         its tokens
    has_run_all: whether the last one has run: where the reader ends an answer, that is chance
    is_cut:      whether its text ends before its tokens do, at a stop string
    """

    text: str = ""
    ids: list[int] = field(default_factory=list)
    has_run_all: bool = False
    is_cut: bool = False
    finish: Literal["stop", "length"] = "length"

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


def write(
    card: ModelCard, asked: OpenQuestion, steps: Generator[int, None, None], most: int, written: AnswerSoFar
) -> Iterator[Event]:
    """Write the answer whose tokens `steps` gives, `most` of them at most, into `written`. `steps` is closed when this
    ends."""
    pieces = TextStream(card.tokenizer, asked.reading.sampling.stop)
    try:
        for token in steps:
            asked.clock.first_token()
            written.ids.append(token)
            if piece := pieces.push(token):
                written.text += piece
                yield Token(piece)
            if pieces.stopped:
                written.is_cut = True
                break
        else:
            written.has_run_all = True
        written.finish = "stop" if written.is_cut or len(written.ids) < most else "length"
        if piece := pieces.finish():
            written.text += piece
            yield Token(piece)
    finally:
        steps.close()
