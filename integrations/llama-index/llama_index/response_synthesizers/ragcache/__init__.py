"""Answers over nodes by fused prefill, inside any LlamaIndex query engine."""

from llama_index.response_synthesizers.ragcache.base import FusedSynthesizer

__all__ = ["FusedSynthesizer"]
