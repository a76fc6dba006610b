"""Learns passages from prompts: text that occurs in a second prompt is kept as a block of the foreign cache.

A prompt's text outside its passages is cut into units of a few lines or sentences. The cuts do not depend on where the
text begins. Only hashes are kept of units that were seen once, in a table of constant size. Units that are adjacent
both in this prompt and in an earlier prompt, where they came after other tokens, form a piece. Pieces are found and
read like every foreign passage.
"""

from __future__ import annotations

import hashlib
import logging
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from itertools import pairwise
from typing import NamedTuple, Self

import numpy as np

from ragcache.engine.caches.content_index import EDGE
from ragcache.engine.caches.prefix_nodes import common_length
from ragcache.errors import CancelledError, StoreError
from ragcache.ingest.encoder import ModelEncoder
from ragcache.models.deadline import Limit, limited
from ragcache.prompt import Prompt, control_tokens, encode_text
from ragcache.runtime import Background
from ragcache.store.collections import OTHERS, View
from ragcache.store.foreign import OWNER, WINDOW, Listed, window_hashes
from ragcache.store.kv_store import KVStore
from ragcache.store.records import NOT_STORED, Chunk
from ragcache.store.warn_once import WarnOnce

log = logging.getLogger(__name__)
# Lengths of a piece in tokens. A shorter paragraph is joined with the next paragraph. If the short paragraph ends a
# passage, the next paragraph belongs to another passage, and both together may never recur: so the lower bound is low.
# It is not lower, because fewer tokens are computed faster than a block is read.
LEAST_TOKENS, MOST_TOKENS = 16, 512
# Lengths of a unit in tokens. A line or sentence of fewer than LEAST_UNIT is joined with the next; a line of more than
# LONG_UNIT is cut where a rolling hash says; no unit has more than MOST_UNIT.
LEAST_UNIT, LONG_UNIT, MOST_UNIT = 16, 64, 128
# Mean distance of the rolling hash's cuts, in tokens.
_SPACING = 32
_MOST_WAITING = 64
# Before each piece the learning thread waits at most this long for answers in progress, so that it learns some pieces
# even if there is always an answer in progress.
_WAIT_S = 1.0
# Closing a store waits at most this long until the waiting prompts have been learnt.
_CLOSE_S = 10.0
_SLOTS = 1 << 17
# Text that front ends put around and between passages. No piece reaches across it.
_TAG = re.compile(
    r"</?(?:source|sources|context|document|documents|document_content|doc|passage|chunk|result|results|memory|"
    r"memories|tool_response|tool_result|file|page|data|item)\b[^<>\n]{0,500}>"
    r"|^[ \t]*(?:\[\d{1,4}\]|(?:Document|Source|Passage|Result) \d{1,4}:)"
    r"|(?:\A|(?<=\n\n))[ \t]*(?:\(\d{1,4}\)|\d{1,4}[.)])"
    r"|^[ \t]*[-=_*~#]{3,}[ \t]*$",
    re.MULTILINE | re.IGNORECASE,
)
_BLANK = re.compile(r"\n(?:[ \t\r]*\n)+")
_LINE = re.compile(r"\n|[.!?][\"')\]]*(?=[ \t])|[。！？]")


class Unit(NamedTuple):
    """Tokens [start, end) of a text.

    name:     hash of its text, and of its tokens that do not depend on the text beside it
    is_apart: whether no piece may reach across its beginning: it begins the text, or a tag or a control token
              begins or ends there
    is_first: whether a blank line comes before it
    """

    start: int
    end: int
    name: bytes
    is_apart: bool
    is_first: bool


class Learner:
    """Keeps pieces of prompts as foreign passages. Thread-safe; `close` it before the store.

    view:    the view through which the prompts are asked; when text of one of its collections is deleted, pieces that
             quote the text are deleted
    own_ids: tokens that the store's own prompts begin with, which are not learnt
    always:  learn a piece at first sight, not at the second
    """

    def __init__(self, kv: KVStore, encoder: ModelEncoder, view: View, own_ids: Sequence[int], *, always: bool) -> None:
        self._kv, self._encoder, self._view, self._always = kv, encoder, view, always
        self._own_ids = np.asarray(own_ids, np.int64)
        self._tokenizer = encoder.card.tokenizer
        self._controls = control_tokens(self._tokenizer).keys()
        self._before = encode_text(self._tokenizer, "a")  # some tokenizers leave out a space that a text begins with
        self._texts: dict[int, str] = {}
        self._sights = np.zeros((_SLOTS, 2), np.uint64)
        self._answers, self._idle = set[object](), threading.Condition()
        self._worker, self._closing = Background(name="ragcache-learn", most=_MOST_WAITING), threading.Event()
        self._complaints = WarnOnce(log)

    def of(self, encoder: ModelEncoder, view: View) -> Self:
        """Return a learner for another view of the store, which shares this learner's thread and table of hashes.

        Text that it has seen and pieces that it keeps are found through that view alone.
        """
        learner = copy(self)
        learner._encoder, learner._view = encoder, view
        return learner

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Have the learning thread wait while the `with` block runs, for _WAIT_S at most before each piece."""
        answer = object()
        with self._idle:
            self._answers.add(answer)
        try:
            yield
        finally:
            with self._idle:
                self._answers.remove(answer)
                self._idle.notify_all()

    def see(self, prompt: Prompt) -> None:
        """Queue a prompt that was answered, to learn from it in another thread. Ignore it if too many prompts wait."""
        try:
            deletions = 0 if self._kv.passages is None else self._kv.passages.deletions(self._names)
        except StoreError as error:
            self._complaints.failed("passages are not learnt from prompts", error)
        else:
            self._worker.submit(self._see, prompt, deletions)

    def wait(self) -> None:
        """Wait until everything that was seen is learnt."""
        self._worker.wait()

    def close(self) -> None:
        """Learn from the prompts that wait, for _CLOSE_S at most, and end the thread. May be called twice."""
        self._worker.wait(_CLOSE_S)
        self._closing.set()
        self._worker.close(cancel=True)

    @property
    def _names(self) -> list[str]:
        """Return the names by which the view's pieces are deleted; see `PassageList.unlearn`."""
        reads = [OTHERS] if self._view.reads is None else sorted(self._view.reads)
        return [*reads, OWNER + self._encoder.owner]

    def _see(self, prompt: Prompt, deletions: int) -> None:
        try:
            with limited(Limit(self._closing)):
                for piece in self._repeated(prompt, deletions):
                    with self._idle:
                        self._idle.wait_for(lambda: not self._answers, _WAIT_S)
                    self._keep(piece, deletions)
            self._complaints.worked()
        except CancelledError:
            log.debug("the store is closed before everything was learnt")
        except Exception as error:  # only later questions are slower
            self._complaints.failed("passages are not learnt from prompts", error)

    def _repeated(self, prompt: Prompt, deletions: int) -> list[list[int]]:
        """Return the token ids of the pieces to keep, and record the prompt's units as seen.

        A piece is kept if earlier prompts had its units after other tokens. If the whole prompt was seen before, all of
        its pieces are kept, except its question. A unit that recurs after the same tokens does not count as seen
        before, because each turn of a conversation sends the earlier turns again.

        deletions: number of deletions when the prompt had been answered. It is part of every hash, so that after a
                   deletion everything counts as unseen
        """
        salt = f"{self._encoder.owner}:{deletions}".encode()
        skipped = common_length(np.asarray(prompt.prefix_ids, np.int64), self._own_ids)
        texts = [prompt.prefix_ids[skipped:], *prompt.labels, prompt.suffix_ids]
        chain = hashlib.sha256(salt + _bytes(prompt.prefix_ids[:skipped]))
        rows, places = list[tuple[Sequence[int], list[Unit]]](), list[list[int]]()
        for text, passage in zip(texts, [(), (), *prompt.chunk_ids], strict=True):
            chain.update(_bytes(passage))
            units, own = self.cut(text), list[int]()
            for unit in units:
                chain.update(_bytes(text[unit.start : unit.end]))
                own.append(_number(chain.digest()))
            rows.append((text, units))
            places.append(own)
        whole = _number(chain.digest())
        is_again = self._always or self._noted(whole) is not None
        pieces, seen = dict[tuple[int, ...], None](), {whole: 0}
        for (text, units), own in zip(rows, places, strict=True):
            alone = [_number(hashlib.sha256(salt + unit.name).digest()) for unit in units]
            pairs = [_number(hashlib.sha256(salt + one.name + next.name).digest()) for one, next in pairwise(units)]
            known, joined = (
                [is_again or self._noted(name) not in (None, place) for name, place in zip(names, ends, strict=True)]
                for names, ends in ((alone, own), (pairs, own[1:]))
            )
            if is_again and text is prompt.suffix_ids:
                known = [one and not asks for one, asks in zip(known, _asking(units), strict=True)]
            pieces.update(dict.fromkeys(tuple(text[start:end]) for start, end in _pieces(units, known, joined)))
            seen.update(zip(alone, own, strict=True))
            seen.update(zip(pairs, own[1:], strict=True))
        for name, place in seen.items():
            self._sights[name % _SLOTS] = name, place
        return [list(piece) for piece in pieces]

    def _noted(self, name: int) -> int | None:
        """Return the place recorded with the name of a unit, of two adjacent units or of a whole prompt.

        A place is a hash of all tokens up to the unit's end; 0 for a whole prompt. Returns None if the name was not
        recorded, or was overwritten since.
        """
        known, noted = self._sights[name % _SLOTS].tolist()
        return noted if known == name else None

    def _keep(self, ids: list[int], deletions: int) -> None:
        blocks, listed = self._kv.foreign, self._kv.passages
        if blocks is None or listed is None:
            return
        chunk = Chunk("", "", 0, str(self._tokenizer.decode(ids)), ids, {}, NOT_STORED, None, 0.0, "", "")
        (whole,) = self._encoder.with_neighbours([chunk])
        key, names = self._encoder.key(ids, whole.neighbours), self._names
        if key not in blocks:
            self._encoder.check(ids, "a piece of a prompt")
            (block,) = self._encoder.encode([ids], [whole.neighbours])
            held = self._kv.put(key, block, "nowhere")
            row = Listed(key, self._encoder.owner, ids, held.num_bytes)
            if listed.learn(row, names, deletions):  # before the block: no deletion finds a block that is not listed
                blocks.put(key, held)
                # Again: the row may have been removed while its block did not exist, or its text deleted meanwhile.
                if not listed.learn(row, names, deletions):
                    blocks.delete(key)

    def cut(self, ids: Sequence[int]) -> list[Unit]:
        """Return the units of a text, given as token ids, from left to right.

        Whether the text is cut at a place depends only on the lines and sentences around the place.
        """
        for new in set(ids) - self._texts.keys():
            self._texts[new] = str(self._tokenizer.decode([*self._before, new]))[1:]
        texts = [self._texts[one] for one in ids]
        starts = np.cumsum([0, *map(len, texts)])
        text = "".join(texts)

        def after(places: list[int]) -> set[int]:
            """Return the numbers of the tokens that begin at these places of the text, or next after them."""
            return set(np.searchsorted(starts, places).tolist())

        controls = [at for at, one in enumerate(ids) if one in self._controls]
        apart = after([place for found in _TAG.finditer(text) for place in found.span()])
        apart |= {0, len(ids), *controls, *(at + 1 for at in controls)}
        first = after([found.end() for found in _BLANK.finditer(text)]) - apart
        edges = sorted(apart | first | after([found.end() for found in _LINE.finditer(text)]))
        for before, edge in list(pairwise(edges)):
            if edge - before > LONG_UNIT:
                hashes = window_hashes(ids[before : edge - LEAST_UNIT])
                edges += (before + WINDOW + np.flatnonzero(hashes % _SPACING == 0)).tolist()
        units, start = list[Unit](), 0
        for edge in sorted(edges):
            while edge - start >= LEAST_UNIT or (edge > start and edge in apart | first):
                end = min(edge, start + MOST_UNIT)
                said = text[starts[start] : starts[end]].strip().encode("utf-8", "replace")
                name = hashlib.sha256(said + b"\0" + _bytes(ids[start + EDGE : end - EDGE])).digest()
                units.append(Unit(start, end, name, start in apart, start in first))
                start = end
        return units


def _pieces(units: Sequence[Unit], known: Sequence[bool], joined: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """Yield the start and end of each range of tokens to keep: whole paragraphs if possible.

    A paragraph of fewer than LEAST_TOKENS is joined with the next paragraph.

    known:  for each unit, whether it was seen before
    joined: for each unit but the first, whether it was seen before after the preceding unit
    """
    start = end = 0
    for unit, is_known, is_joined in zip(units, known, [False, *joined], strict=False):
        ends = unit.is_apart or not (is_known and is_joined) or unit.end - start > MOST_TOKENS
        if ends or (unit.is_first and end - start >= LEAST_TOKENS):
            if end - start >= LEAST_TOKENS:
                yield start, end
            start = unit.start
        start, end = (start, unit.end) if is_known else (unit.end, unit.end)
    if end - start >= LEAST_TOKENS:
        yield start, end


def _asking(units: Sequence[Unit]) -> list[bool]:
    """Return for each unit of a prompt's last text whether it is probably part of the question.

    These are the units of the last paragraph that reach into the last LEAST_UNIT tokens. The beginning of a longer
    question is learnt, together with the passage before it if only a single line break separates them.
    """
    last = max((unit.start for unit in units if unit.is_apart or unit.is_first), default=0)
    least = max((unit.end for unit in units), default=0) - LEAST_UNIT
    return [unit.start >= last and unit.end > least for unit in units]


def _bytes(ids: Sequence[int]) -> bytes:
    return np.asarray(ids, "<i4").tobytes()


def _number(digest: bytes) -> int:
    """Return the number of a digest; never 0, which marks an empty slot."""
    return int.from_bytes(digest[:8], "little") or 1
