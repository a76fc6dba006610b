"""A conversation over nodes by fused prefill."""

from llama_index.chat_engine.ragcache.base import RagCacheChatEngine

__all__ = ["RagCacheChatEngine"]
