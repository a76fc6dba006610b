"""What `pip install` is told to fetch, and a stranger's package of the same import name beside this one."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from setuptools import find_namespace_packages

from ragcache.models.gguf_copy import READERS

ROOT = Path(__file__).resolve().parents[1]
# The other project's distribution, by any way of asking for it: as a requirement with extras, or to pip by its name.
STRANGER = re.compile(r"(?<![\w.\-])ragcache\[(?!['\"])[\w, .\-]+\]|pip3? install(?: -[-\w]+)*[ \"']+ragcache(?![\w-])")
REINSTALL = "--force-" + "reinstall"


def tracked() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False).stdout.decode()
    if not listed:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()]


def test_no_file_asks_for_the_other_projects_distribution():
    found = []
    for path in tracked():
        text = path.read_bytes().decode("utf-8", "ignore")
        found += [f"{path.relative_to(ROOT)}: {match[0]}" for match in STRANGER.finditer(text)]
        found += [f"{path.relative_to(ROOT)}: {REINSTALL}"] * (REINSTALL in text)
    assert not found


def test_the_distribution_has_a_name_of_its_own():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["name"] == "ragcache-kv"


OWN_PACKAGES = {"ragcache", "langchain_ragcache"} | {
    path.name for where in ("extras", "integrations") for path in (ROOT / where).glob("*/ragcache_*")
}


def test_only_the_package_its_integrations_and_its_apps_are_shipped():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    find = settings["packages"]["find"]
    found = [name for where in find["where"] for name in find_namespace_packages(ROOT / where, include=find["include"])]
    assert {name.split(".")[0] for name in found} == {*OWN_PACKAGES, "ragcache_chatbot", "llama_index"}


# Module -> distribution, where its name is another one, or that of the package that brings it along.
DISTRIBUTIONS = {
    "faiss": "faiss-cpu",
    "llama_index": "llama-index-core",
    "llama_index_instrumentation": "llama-index-core",
    "markdown_it": "markdown-it-py",
    "starlette": "fastapi",
    "tokenizers": "transformers",
    "llama_cpp": "llama-cpp-python",
    "opentelemetry": "opentelemetry-sdk",
    "yaml": "pyyaml",
}
# Folder of packages -> extras that bring what it imports beyond the wheel's own requirements.
EXTRAS = {
    ".": ["otel", "server", "structured", "train"],
    "apps/chatbot": ["server"],
    "extras/documents": ["documents"],
    "extras/train": ["train"],
    "extras/watch": ["watch"],
    "integrations/anthropic": ["server"],
    "integrations/completions": ["server"],
    "integrations/langchain": ["langchain"],
    "integrations/llamacpp": ["llamacpp"],
    "integrations/llama-index": ["llama-index"],
    "integrations/mcp": ["mcp", "server"],
    "integrations/ollama": ["server"],
    "integrations/openai": ["server"],
    "integrations/ray": ["ray"],
    "integrations/remote": ["remote"],
    "integrations/vllm": ["otel", "vllm"],
}
# Used where they are installed: pydantic comes with FastAPI, LangChain and MCP, triton with torch on a GPU.
OPTIONAL = {"langchain", "pydantic", "triton"}


def imported(path: Path) -> set[str]:
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom) and node.level == 0}
    return {name.split(".")[0] for name in names} - sys.stdlib_module_names


def declared(requirements: list[str]) -> set[str]:
    return {re.split(r"[^\w.-]", requirement)[0].lower() for requirement in requirements}


def test_an_extra_declares_what_its_packages_import():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    project, find = settings["project"], settings["tool"]["setuptools"]["packages"]["find"]
    for where in find["where"]:
        folder = ROOT / ("ragcache" if where == "." else where)
        files = [path for path in folder.rglob("*.py") if "tests" not in path.parts]
        modules = set().union(*map(imported, files)) - OWN_PACKAGES - OPTIONAL
        requirements = [*project["dependencies"]]
        for extra in EXTRAS.get(where, []):
            requirements += project["optional-dependencies"][extra]
        needed = {DISTRIBUTIONS.get(name, name.replace("_", "-")) for name in modules}
        assert needed <= declared(requirements), where


def test_each_extra_that_reads_gguf_files_brings_what_transformers_reads_them_with():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    for extra in ("gguf", "offline"):
        assert set(READERS) <= declared(extras[extra])


def install(site: Path, folder: str, metadata: str) -> Path:
    (site / folder).mkdir(parents=True)
    (site / folder / ("METADATA" if folder.endswith(".dist-info") else "PKG-INFO")).write_text(metadata)
    return site


FOREIGN = "Metadata-Version: 2.4\nName: ragcache\nVersion: 0.1.0\nSummary: 3-level LLM cache\n"
OWN = "Metadata-Version: 2.4\nName: {}\nVersion: 0.1.0\nSummary: Retrieval-augmented generation that never reads the same passage twice\n"  # noqa: E501  # fmt: skip


def run(*arguments: str, first: Path) -> subprocess.CompletedProcess[str]:
    """Python with `first` before everything else on its path, this checkout behind it."""
    path = os.pathsep.join([str(first), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )


CAUGHT = (
    "import ragcache.errors as e\ntry: from ragcache import Prompt\nexcept e.ForeignPackageError as error: print(error)"
)


def test_a_foreign_distribution_beside_this_one_is_refused(tmp_path):
    site = install(tmp_path, "ragcache-0.1.0.dist-info", FOREIGN)
    used = run("-c", CAUGHT, first=site)
    assert "3-level LLM cache" in used.stdout
    assert "pip uninstall -y ragcache ragcache-kv" in used.stdout
    started = run("-m", "ragcache", "--version", first=site)
    assert started.returncode == 1
    assert started.stderr.startswith("error: another project's package")
    assert "Traceback" not in started.stderr


def test_the_command_notices_a_package_whose_files_lie_over_this_ones(tmp_path):
    """The other was installed last: its front and its command line are imported, everything else is this one's."""
    site = install(tmp_path, "ragcache-0.1.0.dist-info", FOREIGN)
    mixed = site / "ragcache"
    (mixed / "cli").mkdir(parents=True)
    for path in (ROOT / "ragcache").glob("*.py"):
        (mixed / path.name).write_bytes(path.read_bytes())
    (mixed / "__init__.py").write_text("def wrap(client): return client\n")
    (mixed / "cli" / "__init__.py").write_text("")
    started = run("-m", "ragcache", "--version", first=site)
    assert started.returncode == 1
    assert "3-level LLM cache" in started.stderr


@pytest.mark.parametrize(
    ("folder", "metadata"),
    [
        ("ragcache-0.1.0.dist-info", OWN.format("ragcache")),  # an editable install from before the name changed
        ("ragcache.egg-info", OWN.format("ragcache")),  # what building it left in a checkout
        ("ragcache_kv-0.1.0.dist-info", OWN.format("ragcache-kv")),
        ("ragcache-0.2.0.dist-info", ""),  # what an interrupted uninstall left
        ("ragcache_helper-1.0.dist-info", FOREIGN.replace("ragcache", "ragcache-helper")),
    ],
)
def test_own_and_other_distributions_are_no_strangers(tmp_path, folder, metadata):
    used = run("-c", "from ragcache import Prompt; print(Prompt.__name__)", first=install(tmp_path, folder, metadata))
    assert used.stdout.strip() == "Prompt", used.stderr


def test_importing_the_front_looks_nothing_up():
    code = "import sys, ragcache; print('importlib.metadata' in sys.modules, 'torch' in sys.modules)"
    assert run("-S", "-c", code, first=ROOT).stdout.split() == ["False", "False"]
