"""Waiting in tests for what must happen; nothing is measured."""

from __future__ import annotations

import time
from collections.abc import Callable

WAIT_S = 60.0


def until(condition: Callable[[], object], seconds: float = WAIT_S, every_s: float = 0.001) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(every_s)
