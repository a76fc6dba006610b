"""How long a caller waits: a deadline, and an event by which it gives up."""

from __future__ import annotations

import threading
import time
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass

from ragcache.errors import CancelledError, TimedOutError
from ragcache.runtime import during

# A wait looks up so often whether its caller has given up; never more often than the latter.
POLL_S = 0.05
LEAST_POLL_S = 0.005


@dataclass(frozen=True, eq=False)
class Limit:
    """Conditions under which a request ends without an answer.

    cancelled: the caller sets it to give up
    deadline:  on the clock of `time.perf_counter`; None: none
    timeout_s: what the deadline was made from, for the message
    """

    cancelled: threading.Event | None = None
    deadline: float | None = None
    timeout_s: float | None = None

    @classmethod
    def of(cls, cancelled: threading.Event | None, timeout_s: float | None, started: float) -> Limit:
        return cls(cancelled, None if timeout_s is None else started + timeout_s, timeout_s)

    def check(self) -> None:
        """Raises CancelledError once `cancelled` is set, TimedOutError once the deadline is over."""
        if self.cancelled is not None and self.cancelled.is_set():
            raise CancelledError("the request was cancelled")
        if self.deadline is not None and time.perf_counter() >= self.deadline:
            raise TimedOutError(
                f"no answer within {self.timeout_s or 0:g} s; allow more time (timeout_s), ask for a shorter answer, "
                "or ask when there is less to do"
            )

    def allows(self) -> bool:
        """Whether `check` passes."""
        try:
            self.check()
        except (CancelledError, TimedOutError):
            return False
        return True

    def poll_s(self) -> float | None:
        """How long to wait before the next check; None: for ever, as nothing can end the wait."""
        if self.deadline is None:
            return None if self.cancelled is None else POLL_S
        left = max(LEAST_POLL_S, self.deadline - time.perf_counter())
        return left if self.cancelled is None else min(POLL_S, left)


NO_LIMIT = Limit()
LIMIT: ContextVar[Limit] = ContextVar("ragcache_limit", default=NO_LIMIT)


def limited(limit: Limit) -> AbstractContextManager[None]:
    """Within, runs of the model that wait for their turn obey `limit`. Not to be held across a generator's yield."""
    return during(LIMIT, limit)
