"""Embedders that show whether an event loop waits for them, and the store of LangChain's own test suites."""

import asyncio
import threading

import numpy as np
import pytest

import ragcache as rc
from ragcache_demo.bag_of_words import BagOfWords

ANSWER_S = 20.0


class LoopWatch:
    """Asks the running event loop for a response, from the thread that does the work. A loop that waits for the work
    does not respond; a loop that is only slow, on a busy machine, does.
    """

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.answers: list[bool] = []

    def ask(self) -> None:
        if asyncio._get_running_loop() is self.loop:  # the loop itself does the work
            self.answers.append(False)
            return
        alive = threading.Event()
        self.loop.call_soon_threadsafe(alive.set)
        # Once it has failed to answer, waiting longer only makes the test slow.
        self.answers.append(alive.wait(ANSWER_S if all(self.answers) else 0.0))

    @property
    def went_on(self) -> bool:
        return bool(self.answers) and all(self.answers)


class WatchedEmbedder(BagOfWords):
    """An embedder that asks the event loop at every call."""

    def __init__(self) -> None:
        super().__init__()
        self.watch = LoopWatch()

    def embed(self, texts, *, batch_size=32):
        self.watch.ask()
        return np.array([BagOfWords.embed_query(self, text) for text in texts], np.float32)

    def embed_query(self, text):
        self.watch.ask()
        return super().embed_query(text)


class OverAStore:
    """Parts common to all components under LangChain's own suites: components are made with an open store."""

    kb: rc.RagCache

    @pytest.fixture(autouse=True)
    def _kb(self, registry) -> None:
        self.kb = registry

    @property
    def parameters(self) -> dict[str, object]:
        return {"kb": self.kb}

    chat_model_params = embedding_model_params = retriever_constructor_params = parameters
