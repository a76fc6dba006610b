"""Open a store by its path or by an environment variable, or take an open store."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import ragcache as rc
from langchain_ragcache.embedder import PREFIX
from ragcache.errors import ConfigError, EmbedderError

STORE = "RAGCACHE_STORE"
# Options of `rc.RagCache.open` that the environment may set, by the variables that the `ragcache` command uses.
FROM_ENVIRONMENT = {
    name: f"RAGCACHE_{name.upper()}"
    for name in ("model", "method", "embedder", "reranker", "dtype", "device", "system")
}


def open_kb(kb: rc.RagCache | str | Path | None = None, **options: Any) -> rc.RagCache:
    """Return an open store. A path is opened once for all components that name it (`rc.open_shared`); None opens the
    store named by RAGCACHE_STORE.

    options: of `rc.open_shared`, such as `collection`, and of `rc.RagCache.open`; those not given are taken from
             RAGCACHE_MODEL, RAGCACHE_METHOD, RAGCACHE_EMBEDDER, RAGCACHE_RERANKER, RAGCACHE_DTYPE, RAGCACHE_DEVICE and
             RAGCACHE_SYSTEM

    Raises ConfigError (no path anywhere, or options for a store that is open), EmbedderError (a store filled with
    LangChain's embeddings, opened without them) and the errors of `rc.RagCache.open`.
    """
    if isinstance(kb, rc.RagCache):
        return rc.open_shared(kb, **options)
    path = kb if kb is not None else os.environ.get(STORE)
    if not path or not isinstance(path, str | Path):
        raise ConfigError(f"kb is {kb!r}; give an open RagCache or the path of a store, or set {STORE}")
    stated = {name: os.environ[key] for name, key in FROM_ENVIRONMENT.items() if os.environ.get(key)}
    wanted = {name: value for name, value in options.items() if value is not None}
    try:
        return rc.open_shared(path, **{**stated, **wanted})
    except EmbedderError as error:
        if PREFIX not in str(error):
            raise
        raise EmbedderError(
            f"{path}: the store was filled with embeddings of LangChain, which cannot be loaded by their name; open it "
            "with them, as RagCacheVectorStore(path, embedding), and share its kb"
        ) from error
