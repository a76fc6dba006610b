import pytest
from engine_texts import TEXTS
from plain_oracle import plain_transformers

import ragcache as rc


@pytest.fixture
def kb(open_kb) -> rc.RagCache:
    kb = open_kb()
    report = kb.ingest(rc.Document(id, text) for id, text in TEXTS.items())
    assert sorted(report.added) == sorted(TEXTS)
    return kb


@pytest.fixture
def read(monkeypatch):
    """Ids of every prompt that a model read, with what a method put between them."""
    found, check = [], rc.LanguageModel.check_ids

    def check_ids(lm, ids, what):
        if what == "the prompt":
            found.append(list(ids))
        return check(lm, ids, what)

    monkeypatch.setattr(rc.LanguageModel, "check_ids", check_ids)
    return found


@pytest.fixture(scope="module")
def oracle(lm):
    """Plain transformers: the model and its tokenizer."""
    return plain_transformers(lm.name)
