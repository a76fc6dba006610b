"""Who runs the model when: many callers, one pass at a time, as many of them in a pass as fit.

Callers' own threads do the work; there is no thread besides. The caller whose turn it is leads: it takes the runs of
the others that wait into its pass, runs it, hands out the results, and names the next leader, the one that has waited
longest. A caller that is alone leads at once and waits for nobody.

- *Joining*: a run joins another's pass unless it needs a pass of its own (replaced slots, a say before each layer,
  an observer, logits of several tokens). Those run alone, in turn.
- *Lockstep*: sequences that are being decoded come back with their next token a moment after each pass. The leader
  waits for them, a short bounded time, so that they stay in one pass. One that was late is not waited for until it was
  in time.
- *Questions on their way*: who is going to run a prompt says so before it looks for passages. A leader that would go on
  decoding waits for it where it is due within half a pass, and runs it first: else it came a moment too late for one
  pass, and waited for all of it.
- *Fairness*: turns are given in the order of arrival; a run too long for a pass is cut into pieces and stands at the
  end again after each. Within a pass it takes what shorter runs leave, but as the leader always a share. Questions that
  come together are read a few in each pass, so that the first of them do not wait for the last.
- *Errors*: where a joint pass fails, each of its runs is tried alone, so that only the faulty one fails.
- *Giving up*: see `models/limits.py`. A caller leaves while it waits, and between pieces; not amid a pass.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple
from weakref import WeakKeyDictionary

from torch import Tensor

from ragcache.kv.cache import FusedCache
from ragcache.models.joint import Piece, Run
from ragcache.models.limits import LIMIT, POLL_S
from ragcache.openmp import end_team, working_alone

# Longest time that a leader waits for sequences that are being decoded, as a share of the last pass and in seconds.
PATIENCE_SHARE = 0.5
LEAST_PATIENCE_S = 0.002
MOST_PATIENCE_S = 0.05
# The same for questions: what looks for passages beside a pass slows it by about as much.
QUESTION_SHARE = 0.5
# Times from announcement to arrival that say when the next question is due, and how much later it may be.
ARRIVALS = 9
LATE = 1.5
# How long the end of a decoding may wait for the lock to tell of it.
LAST_WORD_S = 0.1
# The part of a pass that the leader gets at least, and the smallest piece that is worth cutting.
LEADERS_SHARE = 4
LEAST_PIECE = 16


@dataclass(frozen=True)
class PassStats:
    """What the passes were so far.

    passes:  how many
    tokens:  that ran in them
    members: passes by how many runs they held: {1: 12, 8: 340}
    """

    passes: int = 0
    tokens: int = 0
    members: dict[int, int] = field(default_factory=dict)


@dataclass(eq=False)
class _Caller:
    """A run that waits for its turn.

    alone:    runs it in a pass of its own; None for a run that may join
    ready:    set when it is finished, or leads
    gave_way: it led, and ran a question before its own run
    """

    run: Run
    alone: Callable[[], Tensor] | None = None
    ready: threading.Event = field(default_factory=threading.Event)
    leads: bool = False
    gave_way: bool = False
    finished: bool = False
    logits: Tensor | None = None
    error: BaseException | None = None

    def finish(self, logits: Tensor | None = None, error: BaseException | None = None) -> None:
        self.logits, self.error, self.finished = logits, error, True

    def result(self) -> Tensor:
        if self.error is not None:
            raise self.error
        if self.logits is None:
            raise RuntimeError("a run ended without logits")
        return self.logits


@dataclass(eq=False)
class _Decoding:
    """A sequence that is being decoded.

    since:  when it got its last token and began to think about the next; None while its run waits or runs
    prompt: it came back in time the last time
    over:   it is not being decoded any more
    """

    since: float | None
    prompt: bool = True
    over: bool = False


class _Member(NamedTuple):
    caller: _Caller
    piece: Piece


class Turns:
    """The model's queue. Thread-safe.

    forward:     runs pieces in one pass and returns each one's last logits
    pass_tokens: most tokens of a pass while others wait, next tokens of decoded sequences aside; a run that cannot be
                 cut may exceed it
    alone_tokens: most tokens of a pass while nobody else is there
    joining:     False: every run is one pass of its own, whenever its caller likes
    """

    def __init__(self, forward: Callable[[Sequence[Piece]], list[Tensor]], pass_tokens: int, alone_tokens: int) -> None:
        self.pass_tokens = pass_tokens
        self.alone_tokens = alone_tokens
        self.joining = True
        self._forward = forward
        self._lock = threading.Lock()
        self._arrived = threading.Condition(self._lock)
        self._waiting: list[_Caller] = []
        self._led = False
        self._decoding: WeakKeyDictionary[FusedCache, _Decoding] = WeakKeyDictionary()
        self._coming: dict[int, float] = {}  # since when, by thread
        self._approaches: deque[float] = deque(maxlen=ARRIVALS)
        self._last_pass_s = 0.0
        self._stats = PassStats()

    def stats(self) -> PassStats:
        with self._lock:
            return PassStats(self._stats.passes, self._stats.tokens, dict(self._stats.members))

    @contextmanager
    def decoding(self, cache: FusedCache) -> Iterator[None]:
        """Within, the sequence in `cache` is being decoded: the passes of others wait a moment for its next token."""
        decoding = _Decoding(time.perf_counter())
        with self._lock:
            self._decoding[cache] = decoding
        try:
            yield
        finally:
            decoding.over, decoding.since = True, None
            self._last_word(cache)

    def _last_word(self, cache: FusedCache | None = None) -> None:
        """Tell that a question or a decoding is over. The garbage collector may end an abandoned generator while this
        very thread holds the lock: then nobody is told, and leaders wait no longer than for one that is late."""
        if self._lock.acquire(timeout=LAST_WORD_S):
            if cache is not None:
                self._decoding.pop(cache, None)
            self._arrived.notify_all()
            self._lock.release()

    @contextmanager
    def expected(self) -> Iterator[None]:
        """Within, the calling thread is about to run a prompt, until it does: see above."""
        thread = threading.get_ident()
        with self._lock:
            self._coming[thread] = time.perf_counter()
        try:
            yield
        finally:
            self._coming.pop(thread, None)
            self._last_word()

    def run(self, run: Run, alone: Callable[[], Tensor] | None = None) -> Tensor:
        """Run all of its tokens, in one or several passes; the last one's logits.

        alone: runs it in a pass of its own, which then holds nobody else

        Raises what the pass raises, CancelledError and TimedOutError (`LIMIT`) while it waits.
        """
        caller = _Caller(run, alone)
        if run.cache.fill is not None and self._others(run.cache):
            with working_alone():  # beside the others' pass, not in it: a slow disk must not stop them
                run.cache.place()
        self._enter(caller)
        while True:
            self._wait(caller)
            if caller.finished:
                return caller.result()
            self._lead(caller)

    def _others(self, cache: FusedCache) -> bool:
        with self._lock:
            return self._led or bool(self._waiting) or self._is_decoding_besides(cache)

    def _is_decoding_besides(self, cache: FusedCache) -> bool:
        return any(other is not cache and not state.over for other, state in self._decoding.items())

    def _enter(self, caller: _Caller) -> None:
        with self._lock:
            self._waiting.append(caller)
            since = self._coming.pop(threading.get_ident(), None)
            if since is not None:
                self._approaches.append(time.perf_counter() - since)
            decoding = self._decoding.get(caller.run.cache)
            if decoding is not None and decoding.since is not None:
                decoding.prompt = time.perf_counter() - decoding.since <= self._patience_s()
                decoding.since = None
            self._arrived.notify_all()
            if not self._led:
                self._appoint(caller)

    def _appoint(self, caller: _Caller) -> None:
        self._led = True
        caller.leads = True
        caller.ready.set()

    def _hand_over(self) -> None:
        self._led = False
        if self._waiting:
            self._appoint(self._waiting[0])

    def _wait(self, caller: _Caller) -> None:
        """Until it is finished, or its turn. Raises what its limit raises."""
        limit = LIMIT.get()
        if not caller.ready.is_set():
            end_team()  # while it waits, whoever runs the model has the processors
        try:
            while not caller.ready.wait(limit.poll_s()):
                if self._is_waiting(caller):
                    limit.check()
            if not caller.finished:
                limit.check()
        except BaseException:
            self._leave(caller)
            raise

    def _is_waiting(self, caller: _Caller) -> bool:
        with self._lock:
            return caller in self._waiting

    def _leave(self, caller: _Caller) -> None:
        """Give up. A pass that holds it is waited for: it works on the caller's cache."""
        while True:
            with self._lock:
                if caller.finished:
                    return
                if caller in self._waiting:
                    self._waiting.remove(caller)
                    if caller.leads:
                        self._hand_over()
                    return
            caller.ready.wait(POLL_S)

    # A pass

    def _lead(self, leader: _Caller) -> None:
        members: list[_Member] = []
        started = time.perf_counter()
        try:
            members += self._gather(leader)
            started = time.perf_counter()
            self._execute(leader, members)
        except BaseException as error:  # interrupted: the others try again
            for member in members:
                if not member.piece.has_run:
                    member.piece.undo()
            leader.finish(error=error)
            raise
        finally:
            self._end(leader, members, time.perf_counter() - started)

    def _gather(self, leader: _Caller) -> list[_Member]:
        """Take the leader, and who joins it, out of the queue."""
        with self._lock:
            leader.leads = False
            leader.ready.clear()
            if leader.alone is not None:
                shares = [(leader, leader.run.left)]
            else:
                first = leader
                if not self._is_question(leader.run):
                    known = set(map(id, self._waiting))
                    self._await_others()
                    came = [one for one in self._waiting if id(one) not in known]
                    first = self._question_before(leader, came) or leader
                shares = self._shares(first)
            for caller, _ in shares:
                self._waiting.remove(caller)
        return [_Member(caller, Piece.next(caller.run, count)) for caller, count in shares]

    def _await_others(self) -> None:
        """A moment for the sequences whose next token is due, and for the questions that are."""
        started = time.perf_counter()
        while True:
            thinking = [one for one in self._decoding.values() if one.since is not None and one.prompt]
            now = time.perf_counter()
            due = started + self._patience_s() if thinking else self._questions_due(started, now)
            if due <= now:
                for one in thinking:
                    one.prompt = False
                return
            self._arrived.wait(due - now)

    def _questions_due(self, started: float, now: float) -> float:
        """When to stop waiting for questions: `now` where none is due soon."""
        if not self._approaches:
            return now
        usual, until = statistics.median(self._approaches), started + QUESTION_SHARE * self._last_pass_s
        due = [since + LATE * usual for since in list(self._coming.values()) if since + usual <= until]
        return min(until, max(due, default=now))

    def _question_before(self, leader: _Caller, came: Sequence[_Caller]) -> _Caller | None:
        """A question that the leader has waited for runs before its own run, once: somebody waits for a first token."""
        if leader.gave_way:
            return None
        found = next((one for one in came if one.alone is None and self._is_question(one.run)), None)
        leader.gave_way = found is not None
        return found

    def _patience_s(self) -> float:
        return min(MOST_PATIENCE_S, max(LEAST_PATIENCE_S, PATIENCE_SHARE * self._last_pass_s))

    def _shares(self, leader: _Caller) -> list[tuple[_Caller, int]]:
        """Who joins with how many tokens: next tokens of sequences always, then others by arrival, long runs last.

        A question that leads has waited for a whole pass already: it takes other questions along, and nothing else.
        """
        run = leader.run
        others = [one for one in self._waiting if one.alone is None and one is not leader]
        if self._is_question(run):
            others = [one for one in others if self._is_question(one.run)]
        room = self.pass_tokens if others or self._is_decoding_besides(run.cache) else self.alone_tokens
        kept = room // LEADERS_SHARE if run.ordered and run.left > room else run.left
        room -= kept
        shares = []
        for one in sorted(others, key=lambda one: (one.run.left > 1) + (one.run.left > self.pass_tokens)):
            count = self._share(one.run, room)
            if count:
                shares.append((one, count))
                room -= count
        return [(leader, min(run.left, kept + max(0, room))), *shares]

    def _is_question(self, run: Run) -> bool:
        """Short, and no next token of a sequence: somebody waits for a first token."""
        return 1 < run.left <= self.pass_tokens

    def _share(self, run: Run, room: int) -> int:
        """How many of its tokens go into what is left of a pass. Only what fits no pass is cut."""
        if run.left == 1 or run.left <= room:
            return run.left
        return room if run.ordered and run.left > self.pass_tokens and room >= LEAST_PIECE else 0

    def _execute(self, leader: _Caller, members: Sequence[_Member]) -> None:
        if leader.alone is not None:
            self._try(leader, leader.alone)
            return
        try:
            rows = self._forward([member.piece for member in members])
        except Exception as error:
            if len(members) == 1:
                members[0].caller.finish(error=error)
                return
            self._one_by_one(members)
            return
        for member, logits in zip(members, rows, strict=True):
            _advance(member, logits)

    def _one_by_one(self, members: Sequence[_Member]) -> None:
        """After a joint pass failed: only whose own pass fails has failed."""
        for member in members:
            member.piece.undo()
        for member in members:
            try:
                _advance(member, self._forward([member.piece])[0])
            except Exception as error:
                member.caller.finish(error=error)

    @staticmethod
    def _try(caller: _Caller, alone: Callable[[], Tensor]) -> None:
        try:
            caller.finish(alone())
        except Exception as error:
            caller.finish(error=error)

    def _end(self, leader: _Caller, members: Sequence[_Member], seconds: float) -> None:
        now = time.perf_counter()
        tokens = sum(member.piece.num_tokens for member in members)
        with self._lock:
            self._last_pass_s = seconds
            counts = dict(self._stats.members)
            counts[len(members)] = counts.get(len(members), 0) + 1
            self._stats = PassStats(self._stats.passes + 1, self._stats.tokens + tokens, counts)
            if leader in self._waiting and leader.finished:  # interrupted before it began, or while it gave way
                self._waiting.remove(leader)
            for caller, _ in members:
                self._requeue(caller, now)
            self._hand_over()

    def _requeue(self, caller: _Caller, now: float) -> None:
        if not caller.finished:
            self._waiting.append(caller)
            return
        decoding = self._decoding.get(caller.run.cache)
        if decoding is not None and not decoding.over:
            decoding.since = now
        caller.ready.set()


def _advance(member: _Member, logits: Tensor) -> None:
    member.piece.end()
    if not member.caller.run.left:
        member.caller.finish(logits)
