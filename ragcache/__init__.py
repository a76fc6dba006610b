"""ragcache: retrieval-augmented generation that never reads the same passage twice."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ragcache.engine.answer import Answer, Done, Reasoning, Source, Sources, Timings, Token, Usage
    from ragcache.engine.attach import Attachment, Hook, attach
    from ragcache.engine.kb import RagCache
    from ragcache.engine.options import GenerationOptions, RetrieveOptions, StoreConfig
    from ragcache.engine.passages import Passage
    from ragcache.engine.precompute import PrecomputeReport
    from ragcache.engine.shared import open_shared
    from ragcache.engine.store import Store
    from ragcache.errors import RagCacheError, UnknownHandleError, UnsupportedModelError
    from ragcache.fusion import METHODS, MethodInfo, methods
    from ragcache.fusion.fuse import FuseOutput, encode, fuse
    from ragcache.fusion.layout import AddedTokens
    from ragcache.fusion.method import FusionMethod, PrefillOutput, PrefillRequest
    from ragcache.fusion.recompute import RecomputeContext, RecomputeMethod
    from ragcache.ingest.chunker import ChunkerConfig
    from ragcache.ingest.document import HANDLE_KEY, Document
    from ragcache.ingest.read_limits import IngestConfig
    from ragcache.ingest.report import IngestReport, ProgressEvent
    from ragcache.kv.block import KVBlock
    from ragcache.kv.block_key import Recipe
    from ragcache.models.language_model import LanguageModel
    from ragcache.models.load import load_lm
    from ragcache.models.sampler import Sampling
    from ragcache.models.tool_calls import ToolCall
    from ragcache.prompt import Prompt, prompt_format
    from ragcache.retrieval.embedder import load_embedder
    from ragcache.retrieval.embedder_types import Embedder
    from ragcache.retrieval.retriever import Hit
    from ragcache.retrieval.windows import fits_window
    from ragcache.store.records import Chunk

__version__ = "0.1.0"

__all__ = [
    "HANDLE_KEY",
    "METHODS",
    "AddedTokens",
    "Answer",
    "Attachment",
    "Chunk",
    "ChunkerConfig",
    "Document",
    "Done",
    "Embedder",
    "FuseOutput",
    "FusionMethod",
    "GenerationOptions",
    "Hit",
    "Hook",
    "IngestConfig",
    "IngestReport",
    "KVBlock",
    "LanguageModel",
    "MethodInfo",
    "Passage",
    "PrecomputeReport",
    "PrefillOutput",
    "PrefillRequest",
    "ProgressEvent",
    "Prompt",
    "RagCache",
    "RagCacheError",
    "RayConfig",
    "Reasoning",
    "Recipe",
    "RecomputeContext",
    "RecomputeMethod",
    "RetrieveOptions",
    "Sampling",
    "Source",
    "Sources",
    "Store",
    "StoreConfig",
    "Timings",
    "Token",
    "ToolCall",
    "UnknownHandleError",
    "UnsupportedModelError",
    "Usage",
    "attach",
    "encode",
    "fits_window",
    "fuse",
    "load_embedder",
    "load_lm",
    "methods",
    "open_shared",
    "prompt_format",
]

# Public names by module. Modules are imported at first use: torch and transformers take seconds, and `ragcache --help`
# needs neither.
_NAMES = {
    "engine.answer": "Answer Done Reasoning Source Sources Timings Token Usage",
    "engine.attach": "Attachment Hook attach",
    "engine.passages": "Passage",
    "engine.kb": "RagCache",
    "engine.precompute": "PrecomputeReport",
    "engine.shared": "open_shared",
    "engine.store": "Store",
    "engine.options": "GenerationOptions RetrieveOptions StoreConfig",
    "errors": "RagCacheError UnknownHandleError UnsupportedModelError",
    "fusion": "METHODS MethodInfo methods",
    "fusion.method": "FusionMethod PrefillRequest PrefillOutput",
    "fusion.fuse": "FuseOutput encode fuse",
    "fusion.layout": "AddedTokens",
    "fusion.recompute": "RecomputeContext RecomputeMethod",
    "ingest.chunker": "ChunkerConfig",
    "ingest.document": "HANDLE_KEY Document",
    "ingest.read_limits": "IngestConfig",
    "ingest.report": "IngestReport ProgressEvent",
    "kv.block": "KVBlock",
    "kv.block_key": "Recipe",
    "models.language_model": "LanguageModel",
    "models.load": "load_lm",
    "models.sampler": "Sampling",
    "models.tool_calls": "ToolCall",
    "prompt": "Prompt prompt_format",
    "retrieval.embedder": "load_embedder",
    "retrieval.embedder_types": "Embedder",
    "retrieval.retriever": "Hit",
    "retrieval.windows": "fits_window",
    "store.records": "Chunk",
}
_HOMES = {name: f"ragcache.{module}" for module, names in _NAMES.items() for name in names.split()}
_HOMES["RayConfig"] = "ragcache_ray.cluster"


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ragcache.foreign_package import refuse_foreign

    refuse_foreign()
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
