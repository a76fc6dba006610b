"""Rates of each API key: requests, tokens of answers, and tokens of uploads. Requests beyond them get 429."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping

from ragcache.engine.keys import LIMITS, Key
from ragcache.models.deadline import CALLER
from ragcache.server.http_errors import ApiError
from ragcache.server.settings import ServerSettings

REQUESTS, TOKENS, UPLOAD_TOKENS = LIMITS
WINDOWS_S = {REQUESTS: 60.0, TOKENS: 60.0, UPLOAD_TOKENS: 3600.0}
NAMES_S = {60.0: "minute", 3600.0: "hour"}


class Quotas:
    """A token bucket for each key and kind. It is full at the start, and refills evenly within its kind's window.

    An amount that is known only afterwards is charged then, so a bucket may be overdrawn; it refuses until it is
    refilled. Used on the event loop alone.

    rates: amounts in a window, by kind; a kind that is absent has no limit. A caller without a key is one key.
    clock: seconds
    """

    def __init__(self, rates: Mapping[str, float], clock: Callable[[], float] = time.monotonic) -> None:
        self._rates = rates
        self.clock = clock
        self._own: dict[str, Mapping[str, float]] = {}  # rates of keys that have their own, by id
        self._used: dict[tuple[str, str], tuple[float, float]] = {}  # the amount used, and when it was noted

    @classmethod
    def of(cls, settings: ServerSettings) -> Quotas:
        rates = {
            REQUESTS: settings.key_requests,
            TOKENS: settings.key_tokens,
            UPLOAD_TOKENS: settings.key_upload_tokens,
        }
        return cls({kind: rate for kind, rate in rates.items() if rate is not None})

    def enter(self, key: Key) -> None:
        """Note the limits of a key, as its file has them now.

        If a limit was lowered, the amount used so far is reduced in proportion.
        """
        before = self._own.get(key.id, key.limits)
        self._own[key.id] = key.limits
        if before is not key.limits:
            for id, kind in [one for one in self._used if one[0] == key.id]:
                used, since = self._used[id, kind]
                old, new = (limits.get(kind, self._rates.get(kind)) for limits in (before, key.limits))
                if old is not None and new is not None:
                    self._used[id, kind] = used * min(1.0, new / old), since

    def left(self, kind: str) -> float:
        """Return the amount that is left for the caller; infinity without a limit."""
        if (rate := self._rate(kind)) is None:
            return math.inf
        now = self.clock()
        used, since = self._used.get((CALLER.get(), kind), (0.0, now))
        return rate - max(0.0, used - (now - since) * rate / WINDOWS_S[kind])

    def charge(self, kind: str, amount: float) -> None:
        """Take an amount from the caller's bucket, even if less is left."""
        if (rate := self._rate(kind)) is not None:
            self._used[CALLER.get(), kind] = rate - self.left(kind) + amount, self.clock()

    def check(self, kind: str) -> None:
        """Raise ApiError (429) if less than one is left for the caller."""
        rate = self._rate(kind)
        if rate is not None and (left := self.left(kind)) < 1:
            window_s, caller = WINDOWS_S[kind], CALLER.get()
            wait_s = math.ceil((1 - left) * window_s / rate)
            raise ApiError(
                429,
                f"{f'the key {caller!r}' if caller else 'a client without a key'} may use {rate:g} {kind} in "
                f"a{'n' * (window_s > 60)} {NAMES_S[window_s]}, and they are used up; go on in {wait_s} s",
                "rate_limit_exceeded",
                headers={"Retry-After": str(wait_s)},
            )

    def _rate(self, kind: str) -> float | None:
        return self._own.get(CALLER.get(), {}).get(kind, self._rates.get(kind))
