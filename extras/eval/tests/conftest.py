from pathlib import Path

import pytest
from tiny_model import save_tiny_llama

import ragcache as rc
from ragcache.prompt import prompt_format
from ragcache_eval.runner import Runner, RunSettings
from tests.cli.conftest import folder, made, model, store  # noqa: F401


@pytest.fixture(scope="session")
def tiny_directory(tmp_path_factory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("evaluated"), positions=2048)


@pytest.fixture(scope="session")
def tiny(tiny_directory) -> rc.LanguageModel:
    return rc.load_lm(tiny_directory)


@pytest.fixture
def runner(tiny) -> Runner:
    return Runner(tiny, prompt_format(tiny.tokenizer), RunSettings(max_tokens=6))
