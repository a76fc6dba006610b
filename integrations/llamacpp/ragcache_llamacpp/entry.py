"""The engine's entry point, which imports llama.cpp only when a model is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ragcache.errors import ConfigError

if TYPE_CHECKING:
    from ragcache_llamacpp.engine import EmbeddedLlama


def load(name: str | Path, address: str) -> EmbeddedLlama:
    """Load a GGUF model for an address such as "llama.cpp:n_ctx=16384".

    Raises ConfigError (no llama-cpp-python, a wrong option) and ModelError.
    """
    try:
        import llama_cpp  # noqa: F401
    except ImportError as error:
        way_out = "pip install 'ragcache-kv[llamacpp]'"
        raise ConfigError(f"engine llama.cpp needs llama-cpp-python ({error}); {way_out}", "engine") from error
    from ragcache_llamacpp.engine import EmbeddedLlama
    from ragcache_llamacpp.options import LlamaOptions

    return EmbeddedLlama(name, LlamaOptions.of(address))
