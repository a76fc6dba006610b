"""How many answers at once: each reserves the memory of its KV before it is read."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ragcache.errors import AnswerTooLargeError
from ragcache.kv.buffers import LARGEST_STEP, SharedContext, capacity_for
from ragcache.kv.prefix_cache import PrefixCache
from ragcache.models.deadline import Limit
from ragcache.models.hub import machine_bytes
from ragcache.models.language_model import LanguageModel

# Without a figure of the user's: the share of the device's memory that all answers may take together.
DEFAULT_SHARE = 2
UNKNOWN_BYTES = 1 << 62  # where the system does not say how much it has


class Size(NamedTuple):
    """What a question's KV takes.

    num_bytes:  for its prompt, and for its answer or the beginning of that
    more_bytes: that a long answer may ask for later, at most
    """

    num_tokens: int
    num_bytes: int
    more_bytes: int = 0


@dataclass(eq=False)
class Claim:
    """One answer's memory.

    num_bytes:   taken at first
    more_bytes:  that it may still ask for
    grown_bytes: that it has asked for since; surely free when it ends
    """

    num_bytes: int
    more_bytes: int
    grown_bytes: int = 0


@dataclass(eq=False, repr=False)
class Admission:
    """Bytes of KV that all answers in progress may hold together. First come, first served; thread-safe.

    A large request is never starved: whatever comes later waits behind it. An answer whose length nobody limits takes
    memory as it grows, before whatever waits to begin. All of them can always end, one after the other if need be (the
    banker's algorithm, Dijkstra 1965): whatever would leave them without that waits.

    budget_bytes: never exceeded
    changed:      the lock of all its state, and of what decides about sizes
    """

    budget_bytes: int

    def __post_init__(self) -> None:
        self.reserved_bytes = self._growing = 0
        self._queue: deque[object] = deque()
        self._claims: set[Claim] = set()
        self.changed = threading.Condition()

    @property
    def waiting(self) -> int:
        return len(self._queue)

    def reserve(self, size: Callable[[], Size], limit: Limit) -> Claim:
        """Wait until there is room, and take it until `end` and `release`.

        size: what is needed, asked whenever there may be room: it may change while others come and go

        Raises AnswerTooLargeError when it can never fit, and what `limit` raises while it does not fit yet.
        """
        ticket = object()
        with self.changed:
            self._queue.append(ticket)
            try:
                self._check(size())
                while self._growing or self._queue[0] is not ticket or not self._fits(size()):
                    limit.check()
                    self.changed.wait(limit.poll_s())
                limit.check()
                claim = Claim(size().num_bytes, size().more_bytes)
                self.reserved_bytes += claim.num_bytes
                self._claims.add(claim)
                return claim
            finally:
                self._queue.remove(ticket)
                self.changed.notify_all()

    def _fits(self, size: Size) -> bool:
        self._check(size)
        return self._can_end(size.num_bytes, [*self._claims, Claim(size.num_bytes, size.more_bytes)])

    def grow(self, claim: Claim, num_bytes: int, limit: Limit) -> None:
        """Wait for more memory, as much of it as the claim states at most. Raises what `limit` raises meanwhile."""
        grown = Claim(0, claim.more_bytes - num_bytes, claim.grown_bytes + num_bytes)
        with self.changed:
            self._growing += 1
            try:
                while not self._can_end(num_bytes, [*(self._claims - {claim}), grown]):
                    limit.check()
                    self.changed.wait(limit.poll_s())
                self.reserved_bytes += num_bytes
                claim.more_bytes, claim.grown_bytes = grown.more_bytes, grown.grown_bytes
            finally:
                self._growing -= 1
                self.changed.notify_all()

    def _can_end(self, num_bytes: int, claims: Sequence[Claim]) -> bool:
        """Whether there is room for so many bytes, and then for every claim, one after the other. What an answer took
        at first may stay behind with a context that others read."""
        free = self.budget_bytes - self.reserved_bytes - num_bytes
        if free < 0:
            return False
        for claim in sorted(claims, key=lambda claim: claim.more_bytes):
            if claim.more_bytes > free:
                return False
            free += claim.grown_bytes
        return True

    def end(self, claim: Claim) -> None:
        """Give back what an answer asked for; what it took at first is the caller's to `release`."""
        with self.changed:
            self._claims.discard(claim)
            self.release(claim.grown_bytes)

    def _check(self, size: Size) -> None:
        if size.num_bytes + size.more_bytes > self.budget_bytes:
            raise AnswerTooLargeError(
                f"prompt and answer have up to {size.num_tokens} tokens, whose KV takes {size.num_bytes} bytes, and "
                f"all answers together may take {self.budget_bytes}; ask for a shorter answer (max_tokens) or fewer "
                "passages (k), or raise answer_bytes"
            )

    def release(self, num_bytes: int) -> None:
        with self.changed:
            self.reserved_bytes -= num_bytes
            self.changed.notify_all()


def default_budget(lm: LanguageModel) -> int:
    """Half of the memory of the model's device."""
    if lm.device.type == "cuda":
        return int(torch.cuda.mem_get_info(lm.device)[1]) // DEFAULT_SHARE
    found = machine_bytes()
    return UNKNOWN_BYTES if found is None else found // DEFAULT_SHARE


def tokens_within(lm: LanguageModel, num_bytes: int) -> int:
    """Tokens whose cache surely takes no more."""
    states = 2 * lm.shape.state_bytes
    return max(0, (num_bytes - states) // (kv_bytes(lm, 1) - states) * capacity_for(1) - LARGEST_STEP)


def kv_bytes(lm: LanguageModel, num_tokens: int) -> int:
    """Bytes of a cache with room for `num_tokens` tokens."""
    position_bytes = lm.shape.num_layers * torch.int64.itemsize
    states = 2 * lm.shape.state_bytes  # behind what was placed, and behind everything
    return capacity_for(num_tokens) * (lm.kv_bytes_per_token + position_bytes) + states


# Contexts that several questions read: placed once, held once, and kept for later questions.


class MemoryNeed(NamedTuple):
    """Memory of one question's KV: of all of it, and of what stands behind the context."""

    whole: Size
    own: Size


@dataclass(eq=False)
class _Context:
    """What stands before the suffix of some questions.

    key:        names what it holds; None: no other question can share it
    is_kept:    whether it stays for later questions
    placed:     None until one question has placed it
    users:      questions that read it or will
    left_bytes: reserved for it by questions that are over
    lent_bytes: lent for it by the prefix tree
    """

    key: Hashable | None
    is_kept: bool
    placed: SharedContext | None = None
    is_being_placed: bool = False
    users: int = 0
    left_bytes: int = 0
    lent_bytes: int = 0


@dataclass(eq=False)
class SharedPrefixRef:
    """One question's part in a context.

    claim:       the memory that it has reserved
    leaves_them: what it took at first is the context's, as long as any question reads that
    """

    _context: _Context
    _admission: Admission
    claim: Claim
    leaves_them: bool

    @property
    def _changed(self) -> threading.Condition:
        return self._admission.changed

    def grow(self, num_bytes: int, limit: Limit) -> None:
        """Wait for so much memory in all, for buffers of its own. Raises what `limit` raises meanwhile."""
        held = self.claim.grown_bytes + (0 if self.leaves_them else self.claim.num_bytes)
        self._admission.grow(self.claim, max(0, num_bytes - held), limit)

    @property
    def placed(self) -> SharedContext | None:
        """The context, where some question has placed it."""
        return self._context.placed

    @contextmanager
    def placing(self, limit: Limit) -> Iterator[Callable[[SharedContext], None] | None]:
        """The function to tell a context that others may read, for the only question that places it at a time; others
        that want it wait. None: it is `placed`, or no other can read it.

        Raises what `limit` raises while it waits.
        """
        context = self._context
        with self._changed:
            while context.is_being_placed:
                limit.check()
                self._changed.wait(limit.poll_s())
            context.is_being_placed = places = context.placed is None and context.key is not None
        if not places:
            yield None
            return
        try:
            yield self._tell
        finally:
            with self._changed:
                context.is_being_placed = False
                self._changed.notify_all()

    def _tell(self, placed: SharedContext) -> None:
        with self._changed:
            self._context.placed = placed
            self.leaves_them = True  # the context lies in buffers of this question


@dataclass(eq=False, repr=False)
class SharedPrefixes:
    """Contexts of the answers in progress and of earlier ones, by what they hold. Thread-safe.

    Answers in progress: the first question reserves memory for all of its KV, and leaves it to the context until the
    last question over that ends. The others reserve memory for their own tokens.

    Earlier answers: a context stays, where it is, within the prefix tree's budget: all together in half of it, unless
    there is only one. The least recently used go. What is in use stays, and what does not fit is not kept.
    """

    admission: Admission
    _tree: PrefixCache

    def __post_init__(self) -> None:
        self._known: OrderedDict[Hashable, _Context] = OrderedDict()  # the least recently left first
        self._changed = self.admission.changed

    @contextmanager
    def admit(
        self, key: Hashable | None, need: MemoryNeed, limit: Limit, *, keep: bool = False
    ) -> Iterator[SharedPrefixRef]:
        """Wait until there is memory for a question over the context of this name; None: it shares none.

        keep: the context may stay for later questions

        Raises AnswerTooLargeError when there can never be, and what `limit` raises while it waits.
        """
        with self._changed:  # from the moment that there is room until it is taken nothing changes
            claim = self.admission.reserve(lambda: need.own if key in self._known else need.whole, limit)
            seat = self._join(key, keep, claim)
        try:
            yield seat
        finally:
            self._leave(seat)

    def forget(self) -> None:
        """Let no further question find what is known: a passage in it may be gone (law 10)."""
        with self._changed:
            known, self._known = self._known, OrderedDict()
            for context in known.values():
                if not context.users:
                    self._give_back(context)

    def _leave(self, seat: SharedPrefixRef) -> None:
        context, num_bytes = seat._context, seat.claim.num_bytes
        with self._changed:
            self.admission.end(seat.claim)
            context.users -= 1
            if seat.leaves_them:
                context.left_bytes += num_bytes
                num_bytes = 0
            if not context.users:
                num_bytes += context.left_bytes
                context.left_bytes = 0
                self._settle(context)
            self.admission.release(num_bytes)

    # Everything below runs under the lock.

    def _join(self, key: Hashable | None, keep: bool, claim: Claim) -> SharedPrefixRef:
        context = None if key is None else self._known.get(key)
        leaves_them = context is None
        if context is None:
            context = _Context(key, keep)
            if key is not None:
                self._known[key] = context
        context.users += 1
        return SharedPrefixRef(context, self.admission, claim, leaves_them)

    def _settle(self, context: _Context) -> None:
        """Keep a context that nobody reads any more, or let go of it."""
        if self._known.get(context.key) is not context:  # forgotten meanwhile
            self._give_back(context)
        elif context.lent_bytes or self._borrow(context):
            self._known.move_to_end(context.key)
        else:
            del self._known[context.key]

    def _borrow(self, context: _Context) -> bool:
        """Have room for it lent by the prefix tree, in place of less recently used ones."""
        if context.placed is None or not context.is_kept or context.placed.num_bytes > self._tree.budget_bytes:
            return False
        num_bytes = context.placed.num_bytes
        room = max(self._tree.budget_bytes // 2, num_bytes) - num_bytes
        idle = [one for one in self._known.values() if one.lent_bytes and not one.users]
        while idle and sum(one.lent_bytes for one in self._known.values()) > room:
            self._give_back(self._known.pop(idle.pop(0).key))
        if sum(one.lent_bytes for one in self._known.values()) > room or not self._tree.lend(num_bytes):
            return False
        context.lent_bytes = num_bytes
        return True

    def _give_back(self, context: _Context) -> None:
        if context.lent_bytes:
            context.placed = None  # its bytes go before another takes their place
            self._tree.take_back(context.lent_bytes)
            context.lent_bytes = 0
