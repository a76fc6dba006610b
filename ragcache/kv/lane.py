"""A CUDA stream beside the model's: layers are placed on it while the layers before them run."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

Wait = Callable[[], None]


class Lane:
    """Runs what it is told in order, beside the current stream, which waits for a piece where it needs one.

    What a piece reads and writes must stay until it is done: the lane holds it until then. Thread-safe.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._running: deque[tuple[torch.cuda.Event, object]] = deque()
        self._lock = threading.Lock()

    def follow(self) -> None:
        """Begin what comes next only when all that the current stream was told is done."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def run(self, work: Callable[[], None], held: object) -> Wait:
        """Tell it some work; returns what makes the current stream wait for it."""
        with torch.cuda.stream(self._stream):
            work()
        event = self._stream.record_event()
        with self._lock:
            self._running.append((event, held))
        return partial(self._wait, event)

    def share(self, tensor: Tensor) -> None:
        """Let the current stream use what a piece of work made."""
        tensor.record_stream(torch.cuda.current_stream(self._device))

    def finish(self) -> None:
        """Wait here until all that it was told is done."""
        self._stream.synchronize()

    def drop_done(self) -> None:
        """Let go of what finished work held."""
        with self._lock:
            while self._running and self._running[0][0].query():  # type: ignore[no-untyped-call]
                self._running.popleft()

    def _wait(self, event: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self._device).wait_event(event)
