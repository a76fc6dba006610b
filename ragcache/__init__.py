"""ragcache: retrieval-augmented generation that never reads the same passage twice."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ragcache.engine.answer import Answer as Answer
    from ragcache.engine.answer import Done as Done
    from ragcache.engine.answer import Reasoning as Reasoning
    from ragcache.engine.answer import Source as Source
    from ragcache.engine.answer import Sources as Sources
    from ragcache.engine.answer import Timings as Timings
    from ragcache.engine.answer import Token as Token
    from ragcache.engine.answer import Usage as Usage
    from ragcache.engine.attach import Attachment as Attachment
    from ragcache.engine.attach import Hook as Hook
    from ragcache.engine.attach import attach as attach
    from ragcache.engine.kb import RagCache as RagCache
    from ragcache.engine.options import GenerationOptions as GenerationOptions
    from ragcache.engine.options import RetrieveOptions as RetrieveOptions
    from ragcache.engine.options import StoreConfig as StoreConfig
    from ragcache.engine.passages import Passage as Passage
    from ragcache.engine.precompute import PrecomputeReport as PrecomputeReport
    from ragcache.engine.shared import open_shared as open_shared
    from ragcache.engine.store import Store as Store
    from ragcache.errors import RagCacheError as RagCacheError
    from ragcache.errors import UnknownHandleError as UnknownHandleError
    from ragcache.errors import UnsupportedModelError as UnsupportedModelError
    from ragcache.fusion import METHODS as METHODS
    from ragcache.fusion import MethodInfo as MethodInfo
    from ragcache.fusion import methods as methods
    from ragcache.fusion.fuse import FuseOutput as FuseOutput
    from ragcache.fusion.fuse import encode as encode
    from ragcache.fusion.fuse import fuse as fuse
    from ragcache.fusion.layout import AddedTokens as AddedTokens
    from ragcache.fusion.method import FusionMethod as FusionMethod
    from ragcache.fusion.method import PrefillOutput as PrefillOutput
    from ragcache.fusion.method import PrefillRequest as PrefillRequest
    from ragcache.fusion.recompute import RecomputeContext as RecomputeContext
    from ragcache.fusion.recompute import RecomputeMethod as RecomputeMethod
    from ragcache.ingest.chunker import ChunkerConfig as ChunkerConfig
    from ragcache.ingest.document import HANDLE_KEY as HANDLE_KEY
    from ragcache.ingest.document import Document as Document
    from ragcache.ingest.read_limits import IngestConfig as IngestConfig
    from ragcache.ingest.report import IngestReport as IngestReport
    from ragcache.ingest.report import ProgressEvent as ProgressEvent
    from ragcache.kv.block import KVBlock as KVBlock
    from ragcache.kv.block_key import Recipe as Recipe
    from ragcache.models.language_model import LanguageModel as LanguageModel
    from ragcache.models.load import load_lm as load_lm
    from ragcache.models.sampler import Sampling as Sampling
    from ragcache.models.tool_calls import ToolCall as ToolCall
    from ragcache.prompt import Prompt as Prompt
    from ragcache.prompt import prompt_format as prompt_format
    from ragcache.retrieval.embedder import load_embedder as load_embedder
    from ragcache.retrieval.embedder_types import Embedder as Embedder
    from ragcache.retrieval.retriever import Hit as Hit
    from ragcache.retrieval.windows import fits_window as fits_window
    from ragcache.store.records import Chunk as Chunk

__version__ = "0.1.0"

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
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ragcache.foreign_package import refuse_foreign

    refuse_foreign()
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
