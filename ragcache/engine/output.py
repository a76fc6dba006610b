"""Turns generated tokens into the events of an answer."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ragcache.engine.answer import Answer, Event, Reasoning, Source, Token, TokenLogprob, Usage
from ragcache.engine.conversation import said
from ragcache.engine.request import Request
from ragcache.fusion.fuse import TokenCounts
from ragcache.models.card import ModelCard
from ragcache.models.generate import Detokenizer
from ragcache.models.sampler import TokenScores
from ragcache.models.tool_calls import Thought, ToolCall, answer_format
from ragcache.models.tool_parser import Parsed, ToolParser
from ragcache.prompt import control_tokens, encode_text


@dataclass
class OutputProcessor:
    """An answer in progress.

    ids:         its tokens
    has_run_all: whether the model has run the last token. If the reader ends the answer, this depends on timing
    is_cut:      whether its text ends before its tokens do, at a stop string or after the last allowed call
    stop:        the stop string that ended it; "": no stop string
    finish:      the answer's `finish_reason`
    scores:      log-probabilities, if requested, as decoding appends them: possibly of more tokens than `ids` has
    logprobs:    log-probabilities of the tokens in `ids`, with the tokens' texts
    sent:        how many of `logprobs` events have carried
    parser:      finds thoughts and calls in its text; None: the text can hold neither
    calls:       the calls found
    reasoning:   the thoughts found
    reasoning_tokens: how many tokens the thoughts have
    """

    text: str = ""
    ids: list[int] = field(default_factory=list)
    has_run_all: bool = False
    is_cut: bool = False
    stop: str = ""
    finish: Literal["stop", "length", "tool_calls"] = "length"
    scores: list[TokenScores] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    sent: int = 0
    parser: ToolParser | None = None
    calls: list[ToolCall] = field(default_factory=list)
    reasoning: str = ""
    reasoning_tokens: int = 0

    @property
    def turn(self) -> str:
        """Return the answer's text and calls as a turn of its conversation; see `said`."""
        return said(self.text, self.calls)

    def said(self, card: ModelCard) -> list[int]:
        """Return the ids that the next turn reads as this answer.

        These are the answer's own tokens if they stand for its text and nothing else, else the ids of its text.
        """
        specials = control_tokens(card.tokenizer, special_only=True)
        if self.is_cut or self.calls or self.reasoning_tokens or not specials.keys().isdisjoint(self.ids):
            return encode_text(card.tokenizer, self.text)
        return self.ids

    def answer(self, request: Request, hits: list[Source], usage: Usage) -> Answer:
        """Return the whole answer."""
        choice = request.options.choice
        return Answer(
            self.text,
            hits,
            request.clock.timings(),
            usage,
            choice.label,
            request.dropped,
            self.finish,
            None if request.options.sampling.logprobs is None else tuple(self.logprobs),
            tuple(self.calls),
            choice.why,
            self.reasoning,
            request.options.dropped_turns,
            self.stop,
        )

    def usage(self, counts: TokenCounts, pinned_tokens: int = 0) -> Usage:
        """Return the token counts of the answer and its prompt. counts: of the prompt"""
        computed, created, cached = counts
        return Usage(sum(counts), cached, len(self.ids), created, computed, self.reasoning_tokens, pinned_tokens)

    def add(self, card: ModelCard, token: int) -> None:
        """Append the next token."""
        before = self.ids[-1:]
        self.ids.append(token)
        if len(self.scores) >= len(self.ids):
            self.logprobs.append(token_logprob(card, before, token, self.scores[len(self.ids) - 1]))

    def events(self, piece: str, *, last: bool = False) -> Iterator[Event]:
        """Yield the events of a piece of generated text, and add the piece to the answer.

        Log-probabilities of tokens that yielded no text go with the next text. last: no text follows
        """
        found: list[Parsed] = [piece] if piece else []
        if self.parser is not None:
            thought = self.parser.is_thinking
            found = [*self.parser.push(piece), *(self.parser.finish() if last else ())]
            self.reasoning_tokens += not last and (thought or self.parser.is_thinking)
        for one in found:
            if isinstance(one, ToolCall):
                self.calls.append(one)
                yield one
            elif isinstance(one, Thought):
                self.reasoning += one
                yield Reasoning(str(one))
            else:
                self.text += one
                yield Token(one, self._unsent())
        if last and (left := self._unsent()):
            yield Token("", left)

    def _unsent(self) -> tuple[TokenLogprob, ...]:
        left = tuple(self.logprobs[self.sent :])
        self.sent = len(self.logprobs)
        return left


def token_logprob(card: ModelCard, before: list[int], token: int, scores: TokenScores) -> TokenLogprob:
    """Return a token's log-probability with its text. before: the preceding token, or none"""
    top = tuple(TokenLogprob(id, _text(card, before, id), logprob) for id, logprob in scores.top)
    return TokenLogprob(token, _text(card, before, token), scores.logprob, top)


def _text(card: ModelCard, before: list[int], token: int) -> str:
    """Return the text that a token adds after the previous token: tokenizers drop the space of a text's first word."""
    head, whole, alone = (
        str(card.tokenizer.decode(ids, clean_up_tokenization_spaces=False))
        for ids in (before, [*before, token], [token])
    )
    return (whole[len(head) :] if whole.startswith(head) else "") or alone


def write(
    card: ModelCard, request: Request, steps: Generator[int, None, None], most: int, written: OutputProcessor
) -> Iterator[Event]:
    """Write the answer whose tokens `steps` yields, at most `most`, into `written`. Closes `steps` at the end."""
    tools, thinking = request.options.tools, request.options.thinking
    is_open = request.has_begun_thoughts(card.tokenizer)
    markers = thinking.markers(card.tokenizer) if thinking else ()
    format = answer_format(tools.format if tools else None, thinking, markers, is_open=is_open)
    if format is not None:
        opened = thinking.open if thinking and is_open else ""
        calls = (tools.most, tools.shown) if tools else (None, ())
        written.parser = ToolParser(format, *calls, opened)
    begun = request.prompt.suffix_ids[-1:] if request.options.continues else ()  # decides how the answer's text begins
    pieces = Detokenizer(card.tokenizer, request.options.sampling.stop, format.markers if format else (), begun)
    try:
        for token in steps:
            request.clock.first_token()
            written.add(card, token)
            pieces.stops = written.parser is None or not written.parser.is_thinking
            yield from written.events(pieces.push(token))
            if pieces.stop or (written.parser and written.parser.is_full):
                written.is_cut, written.stop = True, pieces.stop
                break
        else:
            written.has_run_all = True
        yield from written.events(pieces.finish(), last=True)
        ended = written.is_cut or len(written.ids) < most
        written.finish = ("tool_calls" if written.calls else "stop") if ended else "length"
    finally:
        steps.close()


def sources_of(request: Request, handles: Sequence[str], origins: Sequence[str]) -> list[Source]:
    """Return the sources of an answer: this turn's passages, including those that earlier turns have, too.

    handles, origins: handle and origin of the KV of each passage of earlier turns, then of each new passage
    """
    again = request.earlier_turns.history.again if request.earlier_turns else ()
    kv = list(zip(handles, origins, strict=True))
    by_ids = {tuple(hit.chunk.token_ids): own for hit, own in zip(request.all_hits, kv, strict=True)}
    rows = list(zip(request.hits, kv[len(kv) - len(request.hits) :], strict=True))
    rows += [(hit, by_ids[tuple(hit.chunk.token_ids)]) for hit in again]
    return [Source(hit.chunk, hit.score, *own) for hit, own in rows]
