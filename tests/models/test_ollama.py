"""Models that Ollama has fetched, found by name in its directory."""

import json

import pytest

from ragcache.errors import ModelNotFoundError
from ragcache.models.hub import resolve, split_file
from ragcache.models.ollama import MODEL_LAYER

DIGEST = "sha256-" + "ab" * 32


@pytest.fixture
def home(tmp_path, monkeypatch):
    """Ollama's directory with a model of its library and a model of the hub's."""
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path))
    digests = {"other": "sha256:00", MODEL_LAYER: "sha256:" + "ab" * 32}
    layers = [{"mediaType": kind, "digest": digest} for kind, digest in digests.items()]
    for place in ("registry.ollama.ai/library/qwen3/0.6b", "hf.co/org/tiny/latest"):
        manifest = tmp_path / "manifests" / place
        manifest.parent.mkdir(parents=True)
        manifest.write_text(json.dumps({"layers": layers}))
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / DIGEST).write_bytes(b"GGUF")
    return tmp_path


@pytest.mark.parametrize("name", ["ollama:qwen3:0.6b", "ollama:hf.co/org/tiny"])
def test_a_pulled_model_is_the_file_of_its_weights(home, name):
    where = resolve(name)
    assert where == str(home / "blobs" / DIGEST)
    assert split_file(where) == (str(home / "blobs"), {"gguf_file": DIGEST})


@pytest.mark.parametrize("name", ["ollama:qwen3", "ollama:../../qwen3:0.6b/../x", "ollama:"])
def test_an_absent_model_is_named_with_those_that_are_there(home, name):
    with pytest.raises(ModelNotFoundError, match=r"it has: qwen3:0\.6b"):
        resolve(name)


def test_a_manifest_without_its_weights_says_to_pull_again(home):
    (home / "blobs" / DIGEST).unlink()
    with pytest.raises(ModelNotFoundError, match=r"ollama pull qwen3:0\.6b"):
        resolve("ollama:qwen3:0.6b")
    (home / "manifests/registry.ollama.ai/library/qwen3/0.6b").write_text("[]")
    with pytest.raises(ModelNotFoundError, match="names no weights"):
        resolve("ollama:qwen3:0.6b")
