"""Collects whole answers from streams of events, for single questions or many at once."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

from ragcache.engine.aio import THREADS
from ragcache.engine.answer import Answer, Done, Event
from ragcache.errors import ConfigError


def answer_of(events: deque[Event]) -> Answer:
    """Return the answer that a stream ended with. events: its last event"""
    if events and isinstance(events[-1], Done):
        return events[-1].answer
    raise ConfigError("the stream ended without an answer")  # an Engine that breaks its contract


def ask_many(
    ask: Callable[..., Answer], questions: Iterable[str], cancelled: threading.Event | None = None
) -> list[Answer]:
    """Answer the questions in THREADS threads, so that they share passes; return answers in the questions' order.

    cancelled: the caller sets it to stop every question

    The first error is raised; questions that were not begun are then dropped, and running questions end.
    """
    if isinstance(questions, str):
        raise ConfigError(f"questions is one text, {questions[:40]!r}; give a list of questions, or call `ask`")
    stop = threading.Event() if cancelled is None else cancelled
    with ThreadPoolExecutor(THREADS, thread_name_prefix="ragcache-many") as pool:
        try:
            return list(pool.map(lambda question: ask(question, cancelled=stop), questions))
        except BaseException:
            if cancelled is None:  # the caller's event is not ours to set: running questions then finish
                stop.set()
            raise
