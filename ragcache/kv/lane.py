"""A CUDA stream beside the model's: layers are placed on it while earlier layers run."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

Wait = Callable[[], None]


class Lane:
    """A second stream that runs work in order; the current stream waits for work only when it needs the result.

    The lane keeps the data that a piece of work reads and writes until the work is done. Thread-safe.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._running: deque[tuple[torch.cuda.Event, object]] = deque()
        self._lock = threading.Lock()

    def follow(self) -> None:
        """Start the next work only after everything already queued on the current stream is done."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def run(self, work: Callable[[], None], held: object) -> Wait:
        """Queue work and return a function that makes the current stream wait until the work is done.

        held: objects to keep until the work is done
        """
        with torch.cuda.stream(self._stream):
            work()
        event = self._stream.record_event()
        with self._lock:
            self._running.append((event, held))
        return partial(self._wait, event)

    def share(self, tensor: Tensor) -> None:
        """Let the current stream use a tensor that a piece of work made."""
        tensor.record_stream(torch.cuda.current_stream(self._device))

    def finish(self) -> None:
        """Wait until all queued work is done."""
        self._stream.synchronize()

    def drop_done(self) -> None:
        """Release the objects kept for finished work."""
        with self._lock:
            while self._running and self._running[0][0].query():  # type: ignore[no-untyped-call]
                self._running.popleft()

    def _wait(self, event: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self._device).wait_event(event)
