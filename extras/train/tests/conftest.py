"""The checkpoint that training starts from."""

import pytest
from tiny_model import save_tiny_llama


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_tiny_llama(tmp_path_factory.mktemp("base"))
