"""ragcache: retrieval-augmented generation that never reads the same passage twice."""

from ragcache.engine.answer import Answer, Done, Source, Sources, Timings, Token, Usage
from ragcache.engine.kb import RagCache
from ragcache.engine.opening import StoreConfig
from ragcache.errors import RagCacheError, UnsupportedModelError
from ragcache.fusion import METHODS, MethodInfo, methods
from ragcache.fusion.fuse import Fused, encode, fuse
from ragcache.ingest.chunker import ChunkerConfig
from ragcache.ingest.document import Document
from ragcache.ingest.pipeline import IngestConfig
from ragcache.ingest.report import IngestReport, ProgressEvent
from ragcache.kv.block import KVBlock
from ragcache.kv.identity import Recipe
from ragcache.models.decoding import Sampling
from ragcache.models.lm import LanguageModel
from ragcache.models.loading import load_lm
from ragcache.prompt import Prompt
from ragcache.retrieval.embedder import Embedder, load_embedder
from ragcache.retrieval.retriever import Hit

__version__ = "0.1.0"

__all__ = [
    "METHODS",
    "Answer",
    "ChunkerConfig",
    "Document",
    "Done",
    "Embedder",
    "Fused",
    "Hit",
    "IngestConfig",
    "IngestReport",
    "KVBlock",
    "LanguageModel",
    "MethodInfo",
    "ProgressEvent",
    "Prompt",
    "RagCache",
    "RagCacheError",
    "Recipe",
    "Sampling",
    "Source",
    "Sources",
    "StoreConfig",
    "Timings",
    "Token",
    "UnsupportedModelError",
    "Usage",
    "encode",
    "fuse",
    "load_embedder",
    "load_lm",
    "methods",
]
