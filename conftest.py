"""Shared set-up: no network, few threads, and the fixtures of tests/kit."""

import os
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
ROOT = Path(__file__).parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]

import covering

pytest_plugins = ["kit.plugin"]


def pytest_configure(config):
    covering.LEFT_OUT = "not slow" in config.option.markexpr
