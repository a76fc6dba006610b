"""Decoding over a filled cache: streaming, stop strings, cancellation."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Generator, Sequence

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ragcache.kv.fused_cache import FusedCache
from ragcache.models.deadline import Limit
from ragcache.models.language_model import LanguageModel
from ragcache.models.requests import DecodingSequence
from ragcache.models.sampler import Sampler, Sampling, TokenScores
from ragcache.models.structured import Constraint
from ragcache.models.thoughts import Form
from ragcache.prompt import control_tokens


def decode(
    lm: LanguageModel,
    cache: FusedCache,
    logits: Tensor,
    position: int,
    sampling: Sampling,
    *,
    eos_ids: Sequence[int] = (),
    never: Collection[int] = (),
    prompt_ids: Sequence[int] = (),
    scores: list[TokenScores] | None = None,
    cancelled: threading.Event | None = None,
    limit: Limit | None = None,
    most: int | None = None,
    thoughts: Callable[[Form | None], Form] | None = None,
    room: int | None = None,
    more: Callable[[], int] | None = None,
) -> Generator[int, None, None]:
    """Yield token ids until an EOS or a stop token (not yielded), `max_tokens`, or the model's last position.

    logits:     float32 [vocab_size] of the prompt's last token
    position:   of the first answer token
    never:      ids that are not chosen, beside those that the checkpoint's training for reuse added
    prompt_ids: what a repetition penalty counts as said, beside the answer
    scores:     gets each token's log-probabilities before the token is yielded, if the sampling asks for them
    limit:      when to give up, in place of `cancelled` alone
    most:       tokens at which the answer ends, where that is before all else
    thoughts:   holds the answer's form, where it has one, behind the model's thoughts (`ThoughtLimit`)
    room:       tokens that there is memory for before `more` is asked for further ones; None: all
    more:       waits for memory, in the thread that reads the answer; returns for how many tokens there is some

    Steps of sequences that are decoded at the same time share forward passes, and go on while the caller is busy with
    what it got. Raises CancelledError once `cancelled` is set, what `limit` raises, and ConfigError for a form that the
    model cannot be held to.
    """
    grammar = sampling.grammar()
    form: Form | None = None if grammar is None else Constraint(grammar, lm.tokenizer, lm.vocab_size, eos_ids)
    form = form if thoughts is None else thoughts(form)
    choose = Sampler(sampling, logits.device, {*never, *lm.suppress_tokens}, form, prompt_ids, scores)
    last = min([lm.max_positions, *(position + n for n in (sampling.max_tokens, most) if n is not None)])
    ends = {*eos_ids, *sampling.stop_token_ids}
    decoding = DecodingSequence(cache, choose, position, last, ends, limit or Limit(cancelled))
    if more is not None and room is not None:
        decoding.more, decoding.granted = more, min(position + room, last)
    yield from lm.scheduler.decode(decoding, logits)


class Detokenizer:
    """Turns ids into text pieces as they arrive.

    A piece is held back while it may still change (an unfinished UTF-8 sequence) or may be the start of a stop
    string. Joined, the pieces equal the decoded ids, cut before the first stop string (law 7).

    markers: special tokens that are part of the text; no others are
    begun:   what the ids go on with, so that white space at their beginning is kept; its text is none of theirs
    stops:   whether a stop string ends the text here; not while the model thinks, who is not answering yet
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop: Sequence[str] = (),
        markers: Collection[str] = (),
        begun: Sequence[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        specials = control_tokens(tokenizer, special_only=True) if markers else {}
        self._left_out = {id for id, spelling in specials.items() if spelling not in markers}
        self._skips = not markers
        self._stop = tuple(stop)
        self._ids = list(begun)
        self._sent = len(self._text())
        self.stops = True
        self.stopped = False

    def push(self, token: int) -> str:
        """The text that this token completes; may be empty. Sets `stopped` when a stop string was met."""
        if token not in self._left_out:
            self._ids.append(token)
        return self._emit(self._text(), final=False)

    def finish(self) -> str:
        """The text that is still held back."""
        return "" if self.stopped else self._emit(self._text(), final=True)

    def _text(self) -> str:
        return str(
            self._tokenizer.decode(self._ids, skip_special_tokens=self._skips, clean_up_tokenization_spaces=False)
        )

    def _emit(self, text: str, *, final: bool) -> str:
        stop = self._stop if self.stops else ()
        cut = min((at for s in stop if (at := text.find(s, self._sent)) >= 0), default=-1)
        if cut >= 0:
            self.stopped = True
            text = text[:cut]
        elif not final:
            text = text[: len(text) - self._held_back(text)]
        piece = text[self._sent :]
        self._sent = max(self._sent, len(text))
        return piece

    def _held_back(self, text: str) -> int:
        """Characters at the end that may still change, and before them those that may begin a stop string."""
        sure = text.rstrip("\ufffd")
        begun = (
            n for s in self._stop * self.stops for n in range(min(len(s) - 1, len(sure)), 0, -1) if sure.endswith(s[:n])
        )
        return len(text) - len(sure) + max(begun, default=0)
