"""Names that name no model: refused at once, with the nearest one that there is."""

from __future__ import annotations

import time

import huggingface_hub
import pytest
from tiny_model import save_tiny_llama

import ragcache as rc
from ragcache.errors import ModelNotFoundError


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("minii", "'minii'.* did you mean 'mini'"),
        ("nobody/nothing", "'nobody/nothing'.* nor a model of that name in the hub's cache or on the hub"),
        ("my models/first one", "there is no directory my models/first one"),
        ("some-lab/smal-model", "did you mean 'some-lab/small-model'"),
    ],
)
@pytest.mark.parametrize("offline", [True, False])
def test_a_name_that_names_nothing_fails_at_once_with_the_nearest(name, message, offline, tmp_path, monkeypatch):
    """Without a connection transformers would try for half a minute."""
    (tmp_path / "models--some-lab--small-model").mkdir()
    constants = huggingface_hub.constants
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    started = time.perf_counter()
    with pytest.raises(ModelNotFoundError, match=message):
        rc.load_lm(name)
    assert time.perf_counter() - started < 5


def test_a_misspelt_directory_is_told_the_one_beside_it(tmp_path):
    base = save_tiny_llama(tmp_path / "tiny")
    with pytest.raises(ModelNotFoundError, match=f"did you mean '{base}'"):
        rc.load_lm(base.with_name("tinny"))
