"""Answers: from the prompt that was read to their last token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from ragcache.engine.answer import Event, Token
from ragcache.engine.asking.reading import OpenQuestion
from ragcache.fusion.fuse import Fused
from ragcache.models.decoding import TextStream, decode, eos_token_ids
from ragcache.models.lm import LanguageModel
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

    def said(self, lm: LanguageModel) -> list[int]:
        """Ids that the next turn reads as this answer: its tokens, where they are its text and nothing else."""
        specials = control_tokens(lm.tokenizer, special_only=True)
        if self.is_cut or not specials.keys().isdisjoint(self.ids):
            return encode_text(lm.tokenizer, self.text)
        return self.ids


class AnswerWriter:
    """Writes answers. Thread-safe."""

    def __init__(self, lm: LanguageModel) -> None:
        self.lm = lm
        self._eos = eos_token_ids(lm)

    def write(self, asked: OpenQuestion, fused: Fused, written: AnswerSoFar) -> Iterator[Event]:
        """Decode the answer into `written`. No pass works on the cache any more when this ends."""
        sampling = asked.reading.sampling
        pieces = TextStream(self.lm.tokenizer, sampling.stop)
        steps = decode(
            self.lm,
            fused.cache,
            fused.next_logits,
            fused.next_position,
            sampling,
            eos_ids=self._eos,
            never=fused.reserved_ids,
            limit=asked.limit,
        )
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
            most = min(sampling.max_tokens, self.lm.max_positions - fused.next_position)
            written.finish = "stop" if written.is_cut or len(written.ids) < most else "length"
            if piece := pieces.finish():
                written.text += piece
                yield Token(piece)
        finally:
            steps.close()
