"""A ragcache store as a LlamaIndex vector store; and what its sister packages share: nodes, filters, events."""

from llama_index.vector_stores.ragcache.base import RagCacheVectorStore
from llama_index.vector_stores.ragcache.events import RagCacheRetrievalEvent
from llama_index.vector_stores.ragcache.nodes import HANDLE_KEY

__all__ = ["HANDLE_KEY", "RagCacheRetrievalEvent", "RagCacheVectorStore"]
