"""Embedders that take their time."""

from __future__ import annotations

import threading

import numpy as np

from ragcache.retrieval.testing import BagOfWords

PAUSE_S = 0.6


class SlowEmbedder(BagOfWords):
    """An embedder that stops an event loop for as long as it is waited for there."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.pause = threading.Event()
        self.seconds = seconds
        self.calls = 0

    def embed(self, texts, *, batch_size=32):
        self.calls += 1
        self.pause.wait(self.seconds)
        return np.array([BagOfWords.embed_query(self, text) for text in texts], np.float32)

    def embed_query(self, text):
        self.calls += 1
        self.pause.wait(self.seconds)
        return super().embed_query(text)


class BlockedEmbedder(BagOfWords):
    """Holds a writer in the middle of its work."""

    def __init__(self) -> None:
        super().__init__()
        self.entered, self.release = threading.Event(), threading.Event()

    def embed(self, texts, *, batch_size=32):
        self.entered.set()
        assert self.release.wait(60)
        return super().embed(texts)
