"""A language model that answers over KV blocks: fused prefill for LlamaIndex."""

from llama_index.llms.ragcache.base import RagCacheLLM
from llama_index.llms.ragcache.events import RagCacheFirstTokenEvent, RagCacheKVLoadEvent, RagCachePrefillEvent
from llama_index.llms.ragcache.segments import FusedPrompt, PassageBlock

__all__ = [
    "FusedPrompt",
    "PassageBlock",
    "RagCacheFirstTokenEvent",
    "RagCacheKVLoadEvent",
    "RagCacheLLM",
    "RagCachePrefillEvent",
]
