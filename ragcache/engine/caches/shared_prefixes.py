"""Contexts that several questions read: placed once, held once, and kept for later questions."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from ragcache.engine.admission import Admission, Claim, Size
from ragcache.engine.caches.prefix_cache import PrefixCache
from ragcache.kv.buffers import SharedContext
from ragcache.models.deadline import Limit


class MemoryNeed(NamedTuple):
    """Memory of a question's KV: of all its KV, and of the part after the context."""

    whole: Size
    own: Size


@dataclass(eq=False)
class _Context:
    """The tokens before the suffix of some questions.

    key:        identifies its contents; None: no other question can share it
    is_kept:    whether it stays for later questions
    placed:     None until a question has placed it
    users:      questions that read it or will
    left_bytes: bytes that questions had reserved, and left to the context when they ended
    lent_bytes: bytes that the prefix tree has lent
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
    """One question's share of a context.

    claim:       the memory that the question has reserved
    leaves_them: whether the bytes that it reserved at first belong to the context. When the question ends, they stay
                 reserved until no question reads the context
    """

    _context: _Context
    _admission: Admission
    claim: Claim
    leaves_them: bool

    @property
    def _changed(self) -> threading.Condition:
        return self._admission.changed

    def grow(self, num_bytes: int, limit: Limit) -> None:
        """Wait until `num_bytes` in all are reserved for the question's own buffers.

        Raises the errors of `limit` while it waits.
        """
        held = self.claim.grown_bytes + (0 if self.leaves_them else self.claim.num_bytes)
        self._admission.grow(self.claim, max(0, num_bytes - held), limit)

    @property
    def placed(self) -> SharedContext | None:
        """Return the context, or None before any question has placed it."""
        return self._context.placed

    @contextmanager
    def placing(self, limit: Limit) -> Iterator[Callable[[SharedContext], None] | None]:
        """Yield a function that publishes a context to other questions.

        Only one question places a context at a time; others that need it wait. Yields None if the context is already
        `placed`, or if no other question can read it. Raises the errors of `limit` while it waits.
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
            self.leaves_them = True  # the context is in this question's buffers


@dataclass(eq=False, repr=False)
class SharedPrefixes:
    """Contexts of the answers in progress and of earlier answers, by their contents. Thread-safe.

    Answers in progress: the first question reserves memory for all of its KV, and leaves it to the context until the
    last question over that context ends. The others reserve memory for their own tokens.

    Earlier answers: a context stays in place, within the prefix tree's budget. All contexts together may use half of
    it; a single context may use all. The least recently used are dropped. Contexts in use stay, and a context that does
    not fit is not kept.
    """

    admission: Admission
    _tree: PrefixCache

    def __post_init__(self) -> None:
        self._known: OrderedDict[Hashable, _Context] = OrderedDict()  # the least recently used first
        self._changed = self.admission.changed

    @contextmanager
    def admit(
        self, key: Hashable | None, need: MemoryNeed, limit: Limit, *, keep: bool = False
    ) -> Iterator[SharedPrefixRef]:
        """Wait until there is memory for a question over the context with this key; None: it shares no context.

        keep: the context may stay for later questions

        Raises AnswerTooLargeError if there can never be enough memory, and the errors of `limit` while it waits.
        """
        with self._changed:  # nothing may change between finding room and taking it
            claim = self.admission.reserve(lambda: need.own if key in self._known else need.whole, limit)
            reference = self._join(key, keep, claim)
        try:
            yield reference
        finally:
            self._leave(reference)

    def clear(self) -> None:
        """Hide all known contexts from further questions: a passage in them may have been deleted (law 10)."""
        with self._changed:
            known, self._known = self._known, OrderedDict()
            for context in known.values():
                if not context.users:
                    self._give_back(context)

    def _leave(self, reference: SharedPrefixRef) -> None:
        context, num_bytes = reference._context, reference.claim.num_bytes
        with self._changed:
            self.admission.end(reference.claim)
            context.users -= 1
            if reference.leaves_them:
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
        """Keep a context that no question reads, or drop it."""
        if self._known.get(context.key) is not context:  # forgotten meanwhile
            self._give_back(context)
        elif context.lent_bytes or self._borrow(context):
            self._known.move_to_end(context.key)
        else:
            del self._known[context.key]

    def _borrow(self, context: _Context) -> bool:
        """Borrow memory for the context from the prefix tree, dropping less recently used contexts if needed."""
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
            context.placed = None  # free its bytes before others take their place
            self._tree.return_lent(context.lent_bytes)
            context.lent_bytes = 0
