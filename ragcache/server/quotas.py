"""Rates of each API key: requests, tokens of answers, and tokens of uploads. What is beyond them gets 429."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping

from ragcache.models.deadline import CALLER
from ragcache.server.http_errors import ApiError
from ragcache.server.settings import ServerSettings

REQUESTS, TOKENS, UPLOAD_TOKENS = "requests", "tokens", "upload tokens"
WINDOWS_S = {REQUESTS: 60.0, TOKENS: 60.0, UPLOAD_TOKENS: 3600.0}
NAMES_S = {60.0: "minute", 3600.0: "hour"}


class Quotas:
    """A token bucket for each key and kind. It is full at the start, and refills evenly within its kind's window.

    An amount that is known only afterwards is charged then, so a bucket may be overdrawn; it refuses until it is
    refilled. Used on the event loop alone.

    rates: amounts in a window, by kind; a kind that is absent has no limit. A caller without a key is one key.
    """

    def __init__(self, rates: Mapping[str, float], clock: Callable[[], float] = time.monotonic) -> None:
        self._rates = rates
        self._clock = clock
        self._levels: dict[tuple[str, str], tuple[float, float]] = {}  # level, and when it was so

    @classmethod
    def of(cls, settings: ServerSettings) -> Quotas:
        rates = {
            REQUESTS: settings.key_requests,
            TOKENS: settings.key_tokens,
            UPLOAD_TOKENS: settings.key_upload_tokens,
        }
        return cls({kind: rate for kind, rate in rates.items() if rate is not None})

    def left(self, kind: str) -> float:
        """Return the amount that is left for the caller; infinity without a limit."""
        if kind not in self._rates:
            return math.inf
        rate, now = self._rates[kind], self._clock()
        level, since = self._levels.get((CALLER.get(), kind), (rate, now))
        return min(rate, level + (now - since) * rate / WINDOWS_S[kind])

    def charge(self, kind: str, amount: float) -> None:
        """Take an amount from the caller's bucket, even if less is left."""
        if kind in self._rates:
            self._levels[CALLER.get(), kind] = self.left(kind) - amount, self._clock()

    def check(self, kind: str) -> None:
        """Raise ApiError (429) if less than one is left for the caller."""
        if (left := self.left(kind)) < 1:
            rate, window_s = self._rates[kind], WINDOWS_S[kind]
            wait_s = math.ceil((1 - left) * window_s / rate)
            raise ApiError(
                429,
                f"this key may use {rate:g} {kind} in a{'n' * (window_s > 60)} {NAMES_S[window_s]}, and they are used "
                f"up; go on in {wait_s} s",
                "rate_limit_exceeded",
                headers={"Retry-After": str(wait_s)},
            )
