"""Imports point downwards only, and the engine names no concrete method, codec or tier."""

import ast
from functools import cache
from pathlib import Path

import ragcache
from ragcache.codecs import CODECS
from ragcache.fusion import METHODS
from tools import house

PACKAGE = Path(ragcache.__file__).parent
LAYERS = [
    {"errors"},
    {"runtime", "files", "plugins"},
    {"prompt", "kv"},
    {"models", "codecs"},
    {"fusion", "store"},
    {"retrieval"},
    {"ingest"},
    {"engine"},
    {""},  # the package's front: `from ragcache import RagCache`
    {"server"},
    {"cli"},
    {"__main__"},
]
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}


def part(path: Path) -> str:
    """The part of the package that a file belongs to; "" for the package's own front."""
    first = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    return "" if first == "__init__" else first


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def modules(path: Path) -> set[str]:
    """What a file imports, wherever in the file; of the package's front, the names."""
    found = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module == "ragcache":
            found |= {f"ragcache.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


def imports(path: Path) -> set[str]:
    """Parts of the package that a file imports."""
    parts = {name.split(".")[1] for name in modules(path) if name.startswith("ragcache.")}
    return {name if name in RANK else "" for name in parts}


def test_every_part_has_a_layer():
    assert {part(path) for path in PACKAGE.rglob("*.py")} <= set(RANK)


def test_imports_point_downwards():
    wrong = []
    for path in PACKAGE.rglob("*.py"):
        own = part(path)
        for other in imports(path) - {own}:
            if RANK[other] >= RANK[own]:
                wrong.append(f"{path.relative_to(PACKAGE)} imports {other}")
    assert not wrong


ANNEXES = {
    path.parent.name: path.parent
    for where in ("extras", "integrations")
    for path in sorted((PACKAGE.parent / where).glob("*/ragcache_*/__init__.py"))
}


def roots(path: Path) -> set[str]:
    """Top-level packages that a file imports."""
    return {name.split(".")[0] for name in modules(path)}


def test_annexes_are_plug_ins():
    """The package imports no annex: those register as entry points. An annex imports no other one."""
    assert set(ANNEXES) == {path.rpartition("/")[2] for path in house.ANNEXES}
    for path in PACKAGE.rglob("*.py"):
        assert not roots(path) & set(ANNEXES), path
    for own, folder in ANNEXES.items():
        for path in folder.rglob("*.py"):
            assert not roots(path) & (set(ANNEXES) - {own}), path


def test_the_engine_names_no_implementation():
    for path in (PACKAGE / "engine").rglob("*.py"):
        imported = {
            alias.name for node in ast.walk(tree_of(path)) if isinstance(node, ast.ImportFrom) for alias in node.names
        }
        classes = {cls.__name__ for cls in (*METHODS.values(), *CODECS.values())} | {
            "MemoryTier",
            "DiskTier",
            "DeviceTier",
        }
        assert not imported & classes, path


def test_the_package_imports_nothing_of_the_checkout():
    """What is not shipped (see `packages.find` in pyproject.toml) cannot be imported where ragcache is installed."""
    beside = {"tools", "benchmarks", "tests"}
    for folder in (PACKAGE, *ANNEXES.values()):
        for path in folder.rglob("*.py"):
            assert not beside & roots(path), path


OUTSIDE = [
    *PACKAGE.parent.glob("integrations/langchain/langchain_ragcache/**/*.py"),
    *PACKAGE.parent.glob("integrations/llama-index/llama_index/**/*.py"),
    *PACKAGE.parent.glob("apps/chatbot/ragcache_chatbot/**/*.py"),
    *PACKAGE.parent.glob("examples/*.py"),
]


def test_integrations_apps_and_examples_see_public_names_only():
    assert len(OUTSIDE) > 20
    public = {"ragcache", "ragcache.errors"}
    for path in OUTSIDE:
        for node in ast.walk(tree_of(path)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            seen = {name for name in names if name.split(".")[0] == "ragcache"}
            assert seen <= public, f"{path}: {seen - public}"


LOADERS = {"from_pretrained", "from_config", "SentenceTransformer", "CrossEncoder", "LLM", "load_dataset"}
SETTINGS = {"GenerationConfig", "LoraConfig"}  # they read JSON alone, and have no such argument


def test_every_loader_refuses_a_models_own_code():
    """Without the argument transformers asks on standard input, and a piped "y" runs the directory's Python."""
    root, calls = PACKAGE.parent, 0
    for path in root.rglob("*.py"):
        if {"tests", ".venv", "build"} & set(path.relative_to(root).parts):
            continue
        for node in ast.walk(tree_of(path)):
            if (
                not isinstance(node, ast.Call)
                or getattr(node.func, "attr", getattr(node.func, "id", "")) not in LOADERS
            ):
                continue
            if isinstance(node.func, ast.Attribute) and getattr(node.func.value, "id", "") in SETTINGS:
                continue
            calls += 1
            given = {word.arg: getattr(word.value, "value", None) for word in node.keywords}
            assert given.get("trust_remote_code") is False, f"{path}:{node.lineno} lacks trust_remote_code=False"
    assert calls > 20
