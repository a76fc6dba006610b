"""Decoding over a filled cache: streaming, stop strings, cancellation."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Sequence

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ragcache.kv.fused_cache import FusedCache
from ragcache.models.block_model import BlockModel
from ragcache.models.deadline import Limit
from ragcache.models.requests import DecodingSequence
from ragcache.models.sampler import Sampler, Sampling, TokenScores
from ragcache.models.structured import Constraint
from ragcache.models.thoughts import Form
from ragcache.prompt import control_tokens


def decode(
    lm: BlockModel,
    cache: FusedCache,
    logits: Tensor,
    position: int,
    sampling: Sampling,
    *,
    eos_ids: Sequence[int] = (),
    never: Collection[int] = (),
    prompt_ids: Sequence[int] = (),
    scores: list[TokenScores] | None = None,
    limit: Limit | None = None,
    most: int | None = None,
    thoughts: Callable[[Form | None], Form] | None = None,
    room: int | None = None,
    more: Callable[[], int] | None = None,
) -> Generator[int, None, None]:
    """Yield token ids until an EOS or a stop token (not yielded), `max_tokens`, or the model's last position.

    logits:     float32 [vocab_size] of the prompt's last token
    position:   of the first answer token
    never:      ids that are never chosen, besides those that the checkpoint's training for reuse added
    prompt_ids: ids that a repetition penalty counts as said, besides the answer
    scores:     gets each token's log-probabilities before the token is yielded, if the sampling requests them
    limit:      when to give up
    most:       largest number of tokens in the answer, besides the other limits
    thoughts:   returns a form that applies the given form, if any, only after the model's thoughts (`ThoughtLimit`)
    room:       number of answer tokens that memory is already reserved for; None: for all
    more:       called in the thread that reads the answer once `room` is used up: waits for memory, and returns for how
                many further tokens it was granted; None: memory suffices

    Steps of sequences that are decoded at the same time share forward passes, and continue while the caller processes
    earlier tokens. Raises the errors of `limit`, and ConfigError for a form that cannot be enforced on the model.
    """
    grammar = sampling.grammar()
    form: Form | None = None if grammar is None else Constraint(grammar, lm.tokenizer, lm.vocab_size, eos_ids)
    form = form if thoughts is None else thoughts(form)
    choose = Sampler(sampling, logits.device, {*never, *lm.suppress_tokens}, form, prompt_ids, scores)
    last = min([lm.max_positions, *(position + n for n in (sampling.max_tokens, most) if n is not None)])
    ends = {*eos_ids, *sampling.stop_token_ids}
    decoding = DecodingSequence(cache, choose, position, last, ends, limit or Limit())
    if more is not None and room is not None:
        decoding.more, decoding.granted = more, min(position + room, last)
    yield from lm.scheduler.decode(decoding, logits)


class Detokenizer:
    """A converter of ids into pieces of text, as the ids arrive.

    A piece is held back while it may still change (an unfinished UTF-8 sequence) or may be the start of a stop
    string. Joined, the pieces equal the decoded ids, cut before the first stop string (law 7).

    markers: special tokens that are part of the text; all others are left out
    begun:   ids that the answer continues, so that white space at its beginning is kept; their text is not returned
    stop:    the stop string that ended the text; "": none yet
    stops:   whether a stop string ends the text now; False while the model thinks, since thoughts are not the answer
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
        self.stop = ""

    def push(self, token: int) -> str:
        """Return the text that this token completes, possibly "". Sets `stop` if a stop string was met."""
        if token not in self._left_out:
            self._ids.append(token)
        return self._emit(self._text(), final=False)

    def finish(self) -> str:
        """Return the text that is still held back; "" after a stop string."""
        return "" if self.stop else self._emit(self._text(), final=True)

    def _text(self) -> str:
        return str(
            self._tokenizer.decode(self._ids, skip_special_tokens=self._skips, clean_up_tokenization_spaces=False)
        )

    def _emit(self, text: str, *, final: bool) -> str:
        stop = self._stop if self.stops else ()
        cut, found = min(((at, s) for s in stop if (at := text.find(s, self._sent)) >= 0), default=(-1, ""))
        if found:
            self.stop = found
            text = text[:cut]
        elif not final:
            text = text[: len(text) - self._held_back(text)]
        piece = text[self._sent :]
        self._sent = max(self._sent, len(text))
        return piece

    def _held_back(self, text: str) -> int:
        """Return the number of characters to hold back: they may still change, or may begin a stop string."""
        sure = text.rstrip("\ufffd")
        begun = (
            n for s in self._stop * self.stops for n in range(min(len(s) - 1, len(sure)), 0, -1) if sure.endswith(s[:n])
        )
        return len(text) - len(sure) + max(begun, default=0)
