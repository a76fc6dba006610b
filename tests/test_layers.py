"""What import-linter's contracts in pyproject.toml cannot say: which names outsiders see, and how models are loaded."""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


OUTSIDE = [
    *ROOT.glob("integrations/langchain/langchain_ragcache/**/*.py"),
    *ROOT.glob("integrations/llama-index/llama_index/**/*.py"),
    *ROOT.glob("apps/chatbot/ragcache_chatbot/**/*.py"),
    *ROOT.glob("examples/*.py"),
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
    calls = 0
    for path in ROOT.rglob("*.py"):
        if {"tests", ".venv", ".peers", "build"} & set(path.relative_to(ROOT).parts):
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
    assert calls > 15
