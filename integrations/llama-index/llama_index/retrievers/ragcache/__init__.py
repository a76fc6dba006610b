"""Passages of a ragcache store as LlamaIndex nodes."""

from llama_index.retrievers.ragcache.base import RagCacheRetriever

__all__ = ["RagCacheRetriever"]
