"""The components as installed: leaves of LlamaIndex's namespace, which use public names only."""

import ast
import importlib
import re
import subprocess
import sys
import zipfile
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
HOME = ROOT / "integrations" / "llama-index" / "llama_index"
LEAVES = sorted(path.parent for path in HOME.glob("*/ragcache/__init__.py"))
NAMES = {
    "chat_engine": ["RagCacheChatEngine"],
    "embeddings": ["RagCacheEmbedding"],
    "ingestion": ["RagCachePrecompute"],
    "llms": ["FusedPrompt", "PassageBlock", "RagCacheLLM"],
    "response_synthesizers": ["FusedSynthesizer"],
    "retrievers": ["RagCacheRetriever"],
    "vector_stores": ["HANDLE_KEY", "RagCacheVectorStore"],
}


def test_nothing_above_a_leaf_is_a_package():
    above = {path for leaf in LEAVES for path in (HOME, leaf.parent)}
    assert not [path for path in above if (path / "__init__.py").exists()]
    assert {leaf.parent.name for leaf in LEAVES} == set(NAMES)
    assert all((leaf / "py.typed").is_file() for leaf in LEAVES)


@pytest.mark.parametrize("leaf", NAMES)
def test_leaves_stand_beside_llamaindex_core(leaf):
    core = importlib.import_module("llama_index.core")
    module = importlib.import_module(f"llama_index.{leaf}.ragcache")
    assert set(NAMES[leaf]) <= set(module.__all__)
    assert all(hasattr(module, name) for name in module.__all__)
    assert Path(str(core.__file__)).parent.parent != HOME
    assert getattr(importlib.import_module("llama_index"), "__file__", None) is None


def test_any_leaf_can_be_imported_first():
    graph = {leaf.parent.name: {name for path in leaf.glob("*.py") for name in leaves_of(path)} for leaf in LEAVES}
    TopologicalSorter({leaf: used - {leaf} for leaf, used in graph.items()}).prepare()  # raises CycleError
    assert graph["chat_engine"] >= {"llms", "response_synthesizers"}


def leaves_of(path: Path) -> set[str]:
    """Return the leaves that a file imports."""
    modules = [node.module for node in ast.walk(parsed(path)) if isinstance(node, ast.ImportFrom) and node.module]
    return {match[1] for module in modules if (match := re.match(r"llama_index\.(\w+)\.ragcache", module))}


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@pytest.mark.slow
def test_a_wheel_holds_the_leaves_and_nothing_above_them(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "integrations", "apps"):
        if (ROOT / name).exists():
            (source / name).symlink_to(ROOT / name)
    (source / "ragcache").mkdir()
    (source / "ragcache" / "__init__.py").write_text('__version__ = "0"\n')
    build = "import setuptools.build_meta as backend; print(backend.build_wheel('.'))"
    built = subprocess.run([sys.executable, "-c", build], cwd=source, capture_output=True, text=True, check=True)
    with zipfile.ZipFile(source / built.stdout.split()[-1]) as wheel:
        inside = {name for name in wheel.namelist() if name.startswith("llama_index/")}
    assert {f"llama_index/{leaf}/ragcache/{file}" for leaf in NAMES for file in ("__init__.py", "py.typed")} <= inside
    assert inside == {f"llama_index/{path.relative_to(HOME).as_posix()}" for leaf in LEAVES for path in files(leaf)}


def files(leaf: Path) -> list[Path]:
    return [path for path in leaf.iterdir() if path.is_file()]
