"""A request's caller, and the conditions that end the request without an answer: a deadline and a cancellation."""

from __future__ import annotations

import threading
import time
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field

from ragcache.errors import CancelledError, TimedOutError
from ragcache.runtime import during

# How often a wait checks whether its caller has given up. LEAST_POLL_S: the shortest time between checks.
POLL_S = 0.05
LEAST_POLL_S = 0.005


CALLER: ContextVar[str] = ContextVar("ragcache_caller", default="")
"""Id of the API key that a request came with; "": no key. Server and model divide their time fairly among these ids."""


@dataclass(frozen=True, eq=False)
class Limit:
    """Conditions under which a request ends without an answer, and the caller that it belongs to.

    cancelled: the caller sets it to give up
    deadline:  on the clock of `time.perf_counter`; None: none
    timeout_s: the timeout that the deadline was computed from, for the message
    caller:    see CALLER
    """

    cancelled: threading.Event | None = None
    deadline: float | None = None
    timeout_s: float | None = None
    caller: str = field(default_factory=CALLER.get)

    @classmethod
    def of(cls, cancelled: threading.Event | None, timeout_s: float | None, started: float) -> Limit:
        return cls(cancelled, None if timeout_s is None else started + timeout_s, timeout_s)

    def check(self) -> None:
        """Raise CancelledError once `cancelled` is set, TimedOutError once the deadline has passed."""
        if self.cancelled is not None and self.cancelled.is_set():
            raise CancelledError("the request was cancelled")
        if self.deadline is not None and time.perf_counter() >= self.deadline:
            raise TimedOutError(
                f"no answer within {self.timeout_s or 0:g} s; allow more time (timeout_s), ask for a shorter answer, "
                "or ask when there is less to do"
            )

    def allows(self) -> bool:
        """Return whether `check` passes."""
        try:
            self.check()
        except (CancelledError, TimedOutError):
            return False
        return True

    def poll_s(self) -> float | None:
        """Return how long to wait before the next check; None: for ever, since nothing can end the wait."""
        if self.deadline is None:
            return None if self.cancelled is None else POLL_S
        left = max(LEAST_POLL_S, self.deadline - time.perf_counter())
        return left if self.cancelled is None else min(POLL_S, left)


NO_LIMIT = Limit()
LIMIT: ContextVar[Limit] = ContextVar("ragcache_limit", default=NO_LIMIT)


def limited(limit: Limit) -> AbstractContextManager[None]:
    """Return a context in which runs of the model obey `limit` while they wait.

    Do not hold it across a generator's yield.
    """
    return during(LIMIT, limit)
