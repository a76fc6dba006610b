"""Suites by name: the tables of the papers, a command each."""

from __future__ import annotations

from ragcache.errors import check_choice
from ragcache_eval.suites.base import Suite
from ragcache_eval.suites.papers import A3, KVLINK, SAMKV

SUITES: dict[str, Suite] = {suite.name: suite for suite in (KVLINK, A3, SAMKV)}


def get_suite(name: str) -> Suite:
    """Return a suite by its name. Raises ConfigError naming the available suites."""
    check_choice("suite", name, SUITES)
    return SUITES[name]
