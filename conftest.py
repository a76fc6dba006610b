"""Shared set-up: no network, few threads, and the fixtures of tests/kit."""

import gc
import os
import ssl
import sys
from functools import cache
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# Imports make a million objects that stay. With Python's own thresholds, the garbage collector takes a tenth of the
# tests' time, most of it to look at these objects again.
gc.set_threshold(10_000, 20, 20)
# Otherwise each HTTP client reads all certificates again, although the test servers speak no TLS.
ssl.create_default_context = cache(ssl.create_default_context)
ROOT = Path(__file__).parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]

import covering

pytest_plugins = ["kit.plugin"]


def pytest_configure(config):
    covering.LEFT_OUT = "not slow" in config.option.markexpr


def pytest_collection_finish():
    gc.freeze()  # the garbage collector leaves out what was imported


def pytest_unconfigure():
    gc.unfreeze()  # nanobind's modules print a warning about objects that were never collected
