"""Checks that an embedder is the same that filled the store, by its vectors and not by its name alone.

An application's own embeddings share a name, whichever model computes them. Vectors of another model have the same
length and silently rank wrongly. So a store keeps the vector of a fixed text, and every opening embeds that text again.
"""

from __future__ import annotations

import base64
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from ragcache.errors import EmbedderMismatchError
from ragcache.retrieval.embedder_types import Embedder
from ragcache.store.documents import DocumentStore

PROBE = "The ferry to the island leaves the harbour at half past nine and takes an hour."
PROPERTY = "embedder_probe"

# Share of a vector's length; for vectors of length 1 this is a cosine of 0.995. MiniLM's float16 vectors are 0.001 away
# from its float32 vectors, bfloat16 0.01, a copy quantised to int8 0.3, and another model's vectors 1.4.
TOLERANCE = 0.1


def refuse_other_embedder(documents: DocumentStore, embedder: Embedder) -> None:
    """Compare the embedder with the store's vector of the probe, by a single `embed_query`; a new store saves the
    vector.

    Raises EmbedderMismatchError, and the embedder's own errors.
    """
    vector = np.asarray(embedder.embed_query(PROBE), np.float32)
    recorded = _recorded_vector(documents)
    if recorded is None:
        with suppress(EmbedderMismatchError):  # another process was faster, and its vector is compared now
            documents.bind(PROPERTY, base64.b64encode(vector.astype("<f4").tobytes()).decode())
        recorded = _recorded_vector(documents)
    if recorded is not None and _differ(vector, recorded):
        raise EmbedderMismatchError(
            f"{documents.database.where}: {embedder.name!r} makes another vector of the same text than the embedder "
            "that filled the store: it is another model by the same name, or one that gives no text the same vector "
            "twice; use the model that filled the store, or make a new store"
        )


def _recorded_vector(documents: DocumentStore) -> NDArray[np.float32] | None:
    recorded = documents.properties().get(PROPERTY)
    return None if recorded is None else np.frombuffer(base64.b64decode(str(recorded)), "<f4").astype(np.float32)


def _differ(vector: NDArray[np.float32], recorded: NDArray[np.float32]) -> bool:
    return vector.shape != recorded.shape or not np.linalg.norm(vector - recorded) <= TOLERANCE * np.linalg.norm(
        recorded
    )
