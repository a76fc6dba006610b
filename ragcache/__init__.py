"""ragcache: retrieval-augmented generation that never reads the same passage twice."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ragcache.engine.answer import Answer, Done, Source, Sources, Timings, Token, Usage
    from ragcache.engine.asking.passage import Passage
    from ragcache.engine.kb import RagCache
    from ragcache.engine.library import Library
    from ragcache.engine.options import ReadOptions, RetrieveOptions
    from ragcache.engine.store import StoreConfig
    from ragcache.errors import RagCacheError, UnknownHandleError, UnsupportedModelError
    from ragcache.fusion import METHODS, MethodInfo, methods
    from ragcache.fusion.base import FusionMethod, Job, Prefilled
    from ragcache.fusion.eviction import SnapKV
    from ragcache.fusion.fuse import Fused, encode, fuse
    from ragcache.fusion.layout import Additions
    from ragcache.fusion.recompute import Context, RecomputeMethod
    from ragcache.ingest.chunker import ChunkerConfig
    from ragcache.ingest.document import Document
    from ragcache.ingest.pipeline import IngestConfig
    from ragcache.ingest.report import IngestReport, ProgressEvent
    from ragcache.kv.block import KVBlock
    from ragcache.kv.identity import Recipe
    from ragcache.models.decoding import Sampling
    from ragcache.models.lm import LanguageModel
    from ragcache.models.loading import load_lm
    from ragcache.prompt import Prompt, prompt_format
    from ragcache.retrieval.embedder import Embedder, load_embedder
    from ragcache.retrieval.retriever import Hit
    from ragcache.store.records import Chunk

__version__ = "0.1.0"

__all__ = [
    "METHODS",
    "Additions",
    "Answer",
    "Chunk",
    "ChunkerConfig",
    "Context",
    "Document",
    "Done",
    "Embedder",
    "Fused",
    "FusionMethod",
    "Hit",
    "IngestConfig",
    "IngestReport",
    "Job",
    "KVBlock",
    "LanguageModel",
    "Library",
    "MethodInfo",
    "Passage",
    "Prefilled",
    "ProgressEvent",
    "Prompt",
    "RagCache",
    "RagCacheError",
    "ReadOptions",
    "Recipe",
    "RecomputeMethod",
    "RetrieveOptions",
    "Sampling",
    "SnapKV",
    "Source",
    "Sources",
    "StoreConfig",
    "Timings",
    "Token",
    "UnknownHandleError",
    "UnsupportedModelError",
    "Usage",
    "encode",
    "fuse",
    "load_embedder",
    "load_lm",
    "methods",
    "prompt_format",
]

# Where each public name lives. Modules are imported at first use: torch and transformers take seconds, and
# `ragcache --help` needs neither.
_HOMES = {
    "Additions": "ragcache.fusion.layout",
    "Answer": "ragcache.engine.answer",
    "Chunk": "ragcache.store.records",
    "ChunkerConfig": "ragcache.ingest.chunker",
    "Context": "ragcache.fusion.recompute",
    "Document": "ragcache.ingest.document",
    "Done": "ragcache.engine.answer",
    "Embedder": "ragcache.retrieval.embedder",
    "Fused": "ragcache.fusion.fuse",
    "FusionMethod": "ragcache.fusion.base",
    "Hit": "ragcache.retrieval.retriever",
    "IngestConfig": "ragcache.ingest.pipeline",
    "IngestReport": "ragcache.ingest.report",
    "Job": "ragcache.fusion.base",
    "KVBlock": "ragcache.kv.block",
    "LanguageModel": "ragcache.models.lm",
    "Library": "ragcache.engine.library",
    "METHODS": "ragcache.fusion",
    "MethodInfo": "ragcache.fusion",
    "Passage": "ragcache.engine.asking.passage",
    "Prefilled": "ragcache.fusion.base",
    "ProgressEvent": "ragcache.ingest.report",
    "Prompt": "ragcache.prompt",
    "RagCache": "ragcache.engine.kb",
    "RagCacheError": "ragcache.errors",
    "ReadOptions": "ragcache.engine.options",
    "Recipe": "ragcache.kv.identity",
    "RecomputeMethod": "ragcache.fusion.recompute",
    "RetrieveOptions": "ragcache.engine.options",
    "Sampling": "ragcache.models.decoding",
    "SnapKV": "ragcache.fusion.eviction",
    "Source": "ragcache.engine.answer",
    "Sources": "ragcache.engine.answer",
    "StoreConfig": "ragcache.engine.store",
    "Timings": "ragcache.engine.answer",
    "Token": "ragcache.engine.answer",
    "UnknownHandleError": "ragcache.errors",
    "UnsupportedModelError": "ragcache.errors",
    "Usage": "ragcache.engine.answer",
    "encode": "ragcache.fusion.fuse",
    "fuse": "ragcache.fusion.fuse",
    "load_embedder": "ragcache.retrieval.embedder",
    "load_lm": "ragcache.models.loading",
    "methods": "ragcache.fusion",
    "prompt_format": "ragcache.prompt",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ragcache.foreign import refuse_foreign

    refuse_foreign()
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
