"""The thread that runs the model: it forms every pass, chooses next tokens and hands them out.

Callers submit tokens to run (`run`), a call that needs the model to itself (`run` with `alone`), or a sequence to
decode (`decode`), and wait for a result or read a queue. Iteration-level scheduling as in Orca (Yu et al., OSDI 2022),
with long prompts cut into pieces as in SARATHI (Agrawal et al., 2023).

- *Sharing*: all waiting requests may share one pass, except those that need a pass to themselves (replaced slots, a
  callback before each layer, an observer, logits of several tokens). Those run alone, in turn.
- *Order*: first in, first out. When a short prompt has waited longest, its pass takes other short prompts along but no
  next tokens, because its caller waits for a first token. A run too long for a pass is cut, and returns to the end of
  the queue after each piece.
- *Callers*: a pass takes the requests of the callers for whom the model has worked least so far. A caller that was away
  gets `CREDIT_S` in advance of the others, so that its short question does not wait for another caller's hundred.
- *Errors*: if a shared pass fails, each of its members is tried alone, so that only the faulty member fails.
- *Cancelling*: see `models/deadline.py`. A request is withdrawn while it waits and between its pieces, but not during a
  pass, which works on its cache.

The thread starts with the first request and ends after a while without requests. A forked process has no such thread,
and every call there raises ForkedError.
"""

from __future__ import annotations

import contextvars
import queue
import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from ragcache.forks import Home
from ragcache.models.batch import ForwardRequest, ScheduledTokens
from ragcache.models.deadline import LIMIT, POLL_S
from ragcache.models.requests import DecodingSequence, QueuedRequest, ScheduledRequest
from ragcache.runtime import end_team, working_alone

# After this long without requests, the thread ends; the next request starts another.
IDLE_S = 5.0
# The run that has waited longest gets at least 1 / FIRST_SHARE of a pass if it is too long for one. LEAST_PIECE: the
# smallest number of tokens that any other run is cut to.
FIRST_SHARE = 4
LEAST_PIECE = 16
# Seconds of passes by which callers may differ while they share passes, and by which a caller that returns is ahead.
EVEN_S = 0.1
CREDIT_S = 1.0


@dataclass(frozen=True)
class PassStats:
    """Counts of the passes so far.

    passes:  number of passes
    tokens:  number of tokens that ran in them
    members: number of passes by how many runs they held: {1: 12, 8: 340}
    """

    passes: int = 0
    tokens: int = 0
    members: dict[int, int] = field(default_factory=dict)


@dataclass(eq=False, repr=False)
class Scheduler:
    """A model's queue and the thread that serves it. Thread-safe.

    forward:      runs pieces in a pass and returns each piece's last logits
    pass_tokens:  most tokens of a pass while others wait, not counting next tokens of decoded sequences; a run that
                  cannot be cut may exceed it
    alone_tokens: most tokens of a pass while no other request waits
    sharing:      False gives every run a separate pass
    """

    forward: Callable[[Sequence[ScheduledTokens]], list[Tensor]]
    pass_tokens: int
    alone_tokens: int
    sharing: bool = True

    def __post_init__(self) -> None:
        self.home = Home("this model was loaded", "load it")
        # Re-entrant: the garbage collector may close an abandoned stream within the scheduler's own code.
        self._changed = threading.Condition(threading.RLock())
        self._waiting: list[QueuedRequest] = []
        self._running: list[QueuedRequest] = []
        self._decoding: set[DecodingSequence] = set()
        self._thread: threading.Thread | None = None
        self._stats = PassStats()
        self._worked_s: dict[str, float] = {}  # seconds of passes, by caller

    def stats(self) -> PassStats:
        self.home.check()
        with self._changed:
            return PassStats(self._stats.passes, self._stats.tokens, dict(self._stats.members))

    @property
    def waiting(self) -> int:
        """Return the number of requests that wait for a pass."""
        return len(self._waiting)

    @property
    def is_current_thread(self) -> bool:
        """Return whether the calling thread is the thread that runs the model; its calls need not wait for a turn."""
        return threading.current_thread() is self._thread

    # Called by callers' threads

    def run(self, run: ForwardRequest, alone: Callable[[], Tensor] | None = None) -> Tensor:
        """Run all tokens of the request, in one or several passes, and return the last token's logits.

        alone: runs the request in a separate pass, in the caller's context

        Raises the errors of the pass; CancelledError and TimedOutError (`LIMIT`) while the request waits; ForkedError.
        """
        self.home.check()
        if run.cache.fill is not None and self._is_busy():
            with working_alone():  # outside the shared pass: a slow disk must not delay others
                run.cache.place()
        if alone is not None:  # with the calling thread's current context variables (observers)
            alone = partial(contextvars.copy_context().run, alone)
        request = QueuedRequest(run, alone, limit=LIMIT.get())
        self._submit(request)
        return self._await(request)

    def decode(self, decoding: DecodingSequence, logits: Tensor) -> Generator[int, None, None]:
        """Yield the ids of an answer until one of its `eos_ids` (not yielded) or the position `last`.

        Decoding continues while the caller processes earlier tokens, if memory is granted for further ones; it ends
        when the generator is closed. Raises the errors of a pass, of the limit and of `DecodingSequence.more`, and
        ForkedError.
        """
        self.home.check()
        decoding.limit.check()
        if decoding.position >= decoding.last:
            return
        with self._changed:
            self._decoding.add(decoding)
        try:
            with working_alone():  # the first token at once, outside other callers' passes
                following = decoding.advance(logits)
            if following is not None:
                self._submit(following)
            while (token := self._next_token(decoding)) is not None:
                yield token
        finally:
            self._abandon(decoding)

    def _next_token(self, decoding: DecodingSequence) -> int | None:
        while True:
            self.home.check()
            decoding.limit.check()
            try:
                token = decoding.tokens.get(timeout=decoding.limit.poll_s())
            except queue.Empty:
                continue
            if isinstance(token, BaseException):
                raise token
            if not isinstance(token, QueuedRequest):
                return token
            if decoding.more is not None:
                decoding.granted = decoding.position - 1 + decoding.more()
            with self._changed:
                self._decoding.add(decoding)
            self._submit(token)

    def _abandon(self, decoding: DecodingSequence) -> None:
        """Stop decoding a sequence. Returns once no pass works on its cache."""
        decoding.over = True
        if not self.home.is_here:
            return
        with self._changed:
            self._decoding.discard(decoding)
            self._waiting = [request for request in self._waiting if request.sequence is not decoding]
            while not self.is_current_thread and any(request.sequence is decoding for request in self._running):
                self._changed.wait()

    def _submit(self, request: QueuedRequest) -> None:
        end_team()  # the calling thread's: it waits now, so that the model's thread can use the processors
        with self._changed:
            self._welcome(request.limit.caller)
            self._waiting.append(request)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="ragcache-model")
                self._thread.start()
            self._changed.notify_all()

    def _welcome(self, caller: str) -> None:
        """Let a caller that had no requests count at least as much work as the active caller with the least, less
        CREDIT_S. Otherwise it would have the model to itself until it had caught up with the others."""
        active = {one.limit.caller for one in (*self._waiting, *self._running)}
        active |= {one.limit.caller for one in self._decoding}
        if active and caller not in active:
            least = min(self._worked_s.get(one, 0.0) for one in active) - CREDIT_S
            self._worked_s[caller] = max(least, self._worked_s.get(caller, least))

    def _await(self, request: QueuedRequest) -> Tensor:
        """Return the request's logits, once it has finished. Raises the errors of its limit while no pass holds it."""
        limit = request.limit
        try:
            while not wait([request.finished], limit.poll_s()).done:
                with self._changed:
                    if request in self._waiting:
                        limit.check()
        except BaseException:
            with self._changed:  # wait for a pass that holds it: it works on the caller's cache
                while request in self._running:
                    self._changed.wait()
                if request in self._waiting:
                    self._waiting.remove(request)
            raise
        return request.finished.result()

    def _is_busy(self) -> bool:
        with self._changed:
            return bool(self._running or self._waiting or self._decoding)

    # Called by the scheduler's thread

    def _work(self) -> None:
        with torch.inference_mode():
            while self._await_work():
                self._work_once()

    def _work_once(self) -> None:
        """Run a pass. Its requests are forgotten before the thread waits, so that an idle model keeps no cache."""
        members, started = self._take(), time.perf_counter()
        try:
            if members and (alone := members[0].request.alone) is not None:
                self._finish(members[0].request, alone())
            elif members:
                rows = self.forward([member.piece for member in members])
                for member, logits in zip(members, rows, strict=True):
                    self._advance(member, logits)
        except BaseException as error:  # every error goes to its caller; this thread continues for the others
            if len(members) == 1:
                self._finish(members[0].request, error=error)
            else:
                self._one_by_one(members)
        finally:
            for member in members:
                caller, share_s = member.request.limit.caller, (time.perf_counter() - started) / len(members)
                self._worked_s[caller] = self._worked_s.get(caller, 0.0) + share_s
            self._end(members)

    def _await_work(self) -> bool:
        """Wait for a request; return False when the thread has ended."""
        with self._changed:
            until = time.monotonic() + IDLE_S
            if not self._waiting:
                end_team()  # while there is nothing to run, other threads use the processors
            while not self._waiting:
                # Polling: the interpreter waits for this thread at its end, but does not wake it.
                self._changed.wait(POLL_S)
                if not self._waiting and (time.monotonic() > until or not threading.main_thread().is_alive()):
                    self._thread = None
                    return False
            return True

    def _take(self) -> list[ScheduledRequest]:
        """Take the requests of the next pass out of the queue."""
        with self._changed:
            for request in list(self._waiting):  # the caller of a request may not check its limit for a long time
                try:
                    request.limit.check()
                except Exception as error:
                    self._waiting.remove(request)
                    self._finish(request, error=error)
            if not self._waiting:
                return []
            shares = self._shares(self._whose_turn())
            self._running = [request for request, _ in shares]
            self._waiting = [request for request in self._waiting if request not in self._running]
            for request in self._running:
                request.run.cache.acquire_reference()
            # Checked only once held: the garbage collector may close an abandoned stream at any moment.
            shares = [
                (request, count) for request, count in shares if request.sequence is None or not request.sequence.over
            ]
        return [ScheduledRequest(request, ScheduledTokens.next(request.run, count)) for request, count in shares]

    def _whose_turn(self) -> list[QueuedRequest]:
        """Return the waiting requests of the callers for whom the model has worked least, by arrival."""
        worked_s = [self._worked_s.get(request.limit.caller, 0.0) for request in self._waiting]
        most = min(worked_s) + EVEN_S
        return [request for request, seconds in zip(self._waiting, worked_s, strict=True) if seconds <= most]

    def _shares(self, waiting: Sequence[QueuedRequest]) -> list[tuple[QueuedRequest, int]]:
        """Return the runs of the next pass, with their token counts.

        Next tokens of sequences come first, then other runs by arrival, long runs last.
        """
        first = waiting[0]
        run = first.run
        if first.alone is not None or not self.sharing:
            return [(first, run.left)]
        others = [request for request in waiting if request.alone is None and request is not first]
        if self._is_question(run):
            others = [request for request in others if self._is_question(request.run)]
        room = self.pass_tokens if others or self._decoding else self.alone_tokens
        kept = room // FIRST_SHARE if run.ordered and run.left > room else run.left
        room -= kept
        shares = []
        for request in sorted(
            others, key=lambda request: (request.run.left > 1) + (request.run.left > self.pass_tokens)
        ):
            count = self._share(request.run, room)
            if count:
                shares.append((request, count))
                room -= count
        return [(first, min(run.left, kept + max(0, room))), *shares]

    def _is_question(self, run: ForwardRequest) -> bool:
        """Return whether a run is short and not a sequence's next token, so that its caller waits for a first token."""
        return 1 < run.left <= self.pass_tokens

    def _share(self, run: ForwardRequest, room: int) -> int:
        """Return how many of a run's tokens fit into the rest of a pass. Only a run that fits in no pass is cut."""
        if run.left == 1 or run.left <= room:
            return run.left
        return room if run.ordered and run.left > self.pass_tokens and room >= LEAST_PIECE else 0

    def _one_by_one(self, members: Sequence[ScheduledRequest]) -> None:
        """Run each member of a failed pass separately, so that only the faulty members fail."""
        for member in members:
            member.piece.undo()
        for member in members:
            try:
                self._advance(member, self.forward([member.piece])[0])
            except BaseException as error:
                self._finish(member.request, error=error)

    def _advance(self, member: ScheduledRequest, logits: Tensor) -> None:
        member.piece.end()
        if not member.request.run.left:
            self._finish(member.request, logits)

    def _finish(self, request: QueuedRequest, logits: Tensor | None = None, error: BaseException | None = None) -> None:
        decoding = request.sequence
        if decoding is None or decoding.over:
            if logits is None:
                request.finished.set_exception(error)
            else:
                request.finished.set_result(logits)
        elif logits is None:
            decoding.end(error)
        else:
            self._follow(decoding, logits)

    def _follow(self, decoding: DecodingSequence, logits: Tensor) -> None:
        try:
            following = decoding.advance(logits)
        except Exception as error:  # no probability left to sample from
            decoding.end(error)
            return
        with self._changed:
            if following is not None and not decoding.over:
                self._waiting.append(following)
            elif following is None:
                self._decoding.discard(decoding)

    def _end(self, members: Sequence[ScheduledRequest]) -> None:
        tokens = sum(member.piece.num_tokens for member in members)
        with self._changed:
            if members:
                counts = dict(self._stats.members)
                counts[len(members)] = counts.get(len(members), 0) + 1
                self._stats = PassStats(self._stats.passes + 1, self._stats.tokens + tokens, counts)
            unfinished = [
                request for request in self._running if request.sequence is None and not request.finished.done()
            ]
            self._waiting += unfinished
            for request in self._running:
                request.run.cache.release_reference()
            self._running = []
            self._changed.notify_all()
