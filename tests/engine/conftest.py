import time

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


@pytest.fixture(scope="module")
def oracle(lm):
    """Plain transformers: the model and its tokenizer."""
    return plain_transformers(lm.name)


@pytest.fixture
def slow_model(lm):
    """Every pass takes at least 20 ms: long enough for a loop to be seen going on, and for askers to meet."""
    with lm.model.get_input_embeddings().register_forward_hook(lambda *_: time.sleep(0.02)):
        yield
