from __future__ import annotations

from pathlib import Path

import pytest
from tiny_model import save_tiny_llama

import ragcache as rc
from ragcache.retrieval.testing import BagOfWords

TEXTS = {
    "cats": "The cat sat on the mat. It was happy there.\n",
    "dogs": "Dogs bark at night in the town of Kelbrook.\n",
    "rivers": "The river Arno rises in the Vale hills.\n",
    "clubs": "The rowing club of Kelbrook meets on Monday.\n",
}


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def lm(model_directory) -> rc.LanguageModel:
    return rc.load_lm(model_directory)


@pytest.fixture
def open_kb(tmp_path, lm):
    """Opens the test's store, as often as wanted, and closes what was opened."""
    opened = []

    def open_one(path: Path = tmp_path / "kb", **options) -> rc.RagCache:
        kb = rc.RagCache.open(path, **{"model": lm, "embedder": BagOfWords(), **options})
        opened.append(kb)
        return kb

    yield open_one
    for kb in opened:
        kb.close()


@pytest.fixture
def kb(open_kb) -> rc.RagCache:
    kb = open_kb()
    report = kb.ingest(rc.Document(id, text) for id, text in TEXTS.items())
    assert sorted(report.added) == sorted(TEXTS)
    return kb
