"""Waiting in tests for what must happen; nothing is measured."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable

WAIT_S = 60.0


def until(condition: Callable[[], object], seconds: float = WAIT_S, every_s: float = 0.001) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(every_s)


def stacks() -> str:
    """Where every thread stands."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames().items()
    return "\n".join(f"{names.get(ident)}\n{''.join(traceback.format_stack(frame)[-6:])}" for ident, frame in frames)
