"""ragcache: retrieval-augmented generation that never reads the same passage twice."""

from ragcache.errors import RagCacheError, UnsupportedModelError
from ragcache.fusion import METHODS, MethodInfo, methods
from ragcache.fusion.fuse import Fused, encode, fuse
from ragcache.kv.block import KVBlock
from ragcache.kv.identity import Recipe
from ragcache.models.lm import LanguageModel
from ragcache.models.loading import load_lm
from ragcache.prompt import Prompt

__version__ = "0.1.0"

__all__ = [
    "METHODS",
    "Fused",
    "KVBlock",
    "LanguageModel",
    "MethodInfo",
    "Prompt",
    "RagCacheError",
    "Recipe",
    "UnsupportedModelError",
    "encode",
    "fuse",
    "load_lm",
    "methods",
]
