"""Conversion of nodes to documents of a store. All nodes are checked before any is stored."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
from llama_index.core.schema import BaseNode, MetadataMode

import ragcache as rc
from llama_index.vector_stores.ragcache.nodes import embedded_text, to_document
from ragcache.errors import EmbedderMismatchError

log = logging.getLogger(__name__)
# Share of a vector's length: far above the effect of batching and bfloat16, far below the distance to another model's
# vector.
TOLERANCE = 0.02


def to_documents(kb: rc.RagCache, nodes: Sequence[BaseNode]) -> list[rc.Document]:
    """Return the documents that store these nodes. Nodes without text are left out, because no search could find them,
    and of several nodes with the same id the last is kept, as by an update.

    Raises the errors of `to_document`, and EmbedderMismatchError.
    """
    texts = {node.node_id: node for node in nodes if node.get_content(metadata_mode=MetadataMode.NONE).strip()}
    if len(texts) < len(nodes):
        left = len(nodes) - len(texts)
        log.warning("%d of %d nodes have no text, or an id that a later node has: not stored", left, len(nodes))
    documents = [to_document(node) for node in texts.values()]
    check_embeddings(kb, nodes)
    return documents


def raise_failure(report: rc.IngestReport) -> None:
    """Raise the error of the first node that was not stored, if any; the others are stored."""
    if report.failed:
        error = report.failed[0].error
        if len(report.failed) > 1:
            error.add_note(f"{len(report.failed)} nodes were not stored; this is the first")
        raise error


def check_embeddings(kb: rc.RagCache, nodes: Sequence[BaseNode]) -> None:
    """Raise EmbedderMismatchError if embeddings of nodes were made by another model than the store's.

    The length of each embedding is compared, and the values of the first embedding whose text fits the embedder's
    window. Nodes need no embedding, as the store embeds every passage itself.
    """
    given = [node for node in nodes if node.embedding is not None]
    for node in given:
        check_dimension(kb, node.embedding or [], f"the embedding of node {node.node_id}")
    if not given:
        return
    first = next((node for node in given if rc.fits_window(kb.embedder, embedded_text(node))), None)
    if first is None:
        return
    own = kb.embedder.embed([embedded_text(first)])[0]
    distance = float(np.linalg.norm(np.asarray(first.embedding, np.float32) - own))
    if distance > TOLERANCE * float(np.linalg.norm(own)):
        raise EmbedderMismatchError(
            f"the embedding of node {first.node_id} was made by another model than the store's, "
            f"{kb.embedder.name!r}, or from another text; use embed_model=RagCacheEmbedding(kb)"
        )


def check_dimension(kb: rc.RagCache, vector: Sequence[float], what: str) -> None:
    if len(vector) != kb.embedder.dimension:
        raise EmbedderMismatchError(
            f"{what} has {len(vector)} dimensions; the store's embedder {kb.embedder.name!r} makes "
            f"{kb.embedder.dimension}: use embed_model=RagCacheEmbedding(kb)"
        )
