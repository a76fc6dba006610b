"""Shared set-up: no network, few threads, and the fixtures of tests/kit."""

import gc
import os
import ssl
import sys
from functools import cache
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# A collection looks at a million objects of imported modules: one in ten seconds of the tests.
gc.set_threshold(10_000, 20, 20)
# Each client of a test server would read all certificates again, for a connection without TLS.
ssl.create_default_context = cache(ssl.create_default_context)
ROOT = Path(__file__).parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]

import covering

pytest_plugins = ["kit.plugin"]


def pytest_configure(config):
    covering.LEFT_OUT = "not slow" in config.option.markexpr


def pytest_collection_finish():
    gc.freeze()  # what was imported stays until the end


def pytest_unconfigure():
    gc.unfreeze()  # modules of nanobind complain about objects that are left at the end
