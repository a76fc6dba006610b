"""Whole answers from streams of events, one at a time or many side by side."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

from ragcache.engine.aio import THREADS
from ragcache.engine.answer import Answer, Done, Event
from ragcache.errors import ConfigError


def collect(events: Iterator[Event]) -> Answer:
    """The answer that the stream ends with."""
    for event in events:
        if isinstance(event, Done):
            return event.answer
    raise ConfigError("the stream ended without an answer")  # a Reader that breaks its contract


def ask_many(
    ask: Callable[..., Answer], questions: Iterable[str], cancelled: threading.Event | None = None
) -> list[Answer]:
    """Answers in the order of the questions, asked from THREADS threads so that they share passes.

    cancelled: the caller sets it to stop all of them

    The first error is raised; questions that were not begun are dropped then, and running ones end.
    """
    if isinstance(questions, str):
        raise ConfigError(f"questions is one text, {questions[:40]!r}; give a list of questions, or call `ask`")
    stop = threading.Event() if cancelled is None else cancelled
    with ThreadPoolExecutor(THREADS, thread_name_prefix="ragcache-many") as pool:
        try:
            return list(pool.map(lambda question: ask(question, cancelled=stop), questions))
        except BaseException:
            if cancelled is None:  # another's event is not ours to set: what runs then runs to its end
                stop.set()
            raise
