"""KV of nodes inside a LlamaIndex ingestion pipeline."""

from llama_index.ingestion.ragcache.attachment import RagCachePrecompute

__all__ = ["RagCachePrecompute"]
