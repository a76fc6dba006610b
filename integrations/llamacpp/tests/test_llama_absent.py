"""Messages without llama-cpp-python, which is built from source and so is often not installed."""

import sys

import pytest

import ragcache as rc
from ragcache.engine.contract import EMBEDDED
from ragcache.errors import ConfigError


def test_an_absent_library_is_named_with_the_way_out(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    assert "llama.cpp" in EMBEDDED
    with pytest.raises(ConfigError, match=r"needs llama-cpp-python.*ragcache-kv\[llamacpp\]"):
        rc.RagCache.open(tmp_path / "kb", model="model.gguf", engine="llama.cpp")
