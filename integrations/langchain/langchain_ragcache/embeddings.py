"""A store's embedder as LangChain embeddings."""

from __future__ import annotations

import os

from langchain_core.embeddings import Embeddings

import ragcache as rc
from ragcache.errors import ConfigError


class RagCacheEmbeddings(Embeddings):
    """The embedder of a store, for a chain that embeds texts itself, so that a single model is loaded and all vectors
    are comparable.

    kb:       an open store, whose embedder is shared
    embedder: instead of kb, an `rc.Embedder` or an argument of `rc.load_embedder`: "minilm", "contriever", a directory,
              a hub id. With neither, the embedder named by RAGCACHE_EMBEDDER, or else "minilm"

    Raises ConfigError (both given) and EmbedderError.
    """

    def __init__(self, kb: rc.RagCache | None = None, *, embedder: rc.Embedder | str | None = None) -> None:
        if kb is not None and embedder is not None:
            raise ConfigError("give kb or embedder, not both: a store has an embedder of its own")
        chosen = kb.embedder if kb is not None else embedder or os.environ.get("RAGCACHE_EMBEDDER") or "minilm"
        self.embedder: rc.Embedder = rc.load_embedder(chosen) if isinstance(chosen, str) else chosen

    @property
    def model(self) -> str:
        """Return the name of the embedding model."""
        return self.embedder.name

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return [[float(value) for value in vector] for vector in self.embedder.embed(texts)]

    def embed_query(self, text: str) -> list[float]:
        return [float(value) for value in self.embedder.embed_query(text)]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.model!r})"
