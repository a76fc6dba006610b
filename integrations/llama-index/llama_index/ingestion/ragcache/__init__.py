"""KV blocks computed inside a LlamaIndex ingestion pipeline."""

from llama_index.ingestion.ragcache.attachment import RagCachePrecompute
from llama_index.ingestion.ragcache.base import RagCacheTransform

__all__ = ["RagCachePrecompute", "RagCacheTransform"]
