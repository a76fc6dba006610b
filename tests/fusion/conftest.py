"""Models of the families, loaded when a test asks for one."""

from __future__ import annotations

from pathlib import Path

import pytest
from families import FAMILIES, METHOD_FAMILIES, load_tiny

HERE = Path(__file__).parent
OTHERS = FAMILIES.keys() - set(METHOD_FAMILIES)


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(items):
    """The laws run over all families each time; one method's tests run over those without traits of their own with
    `scripts/test --all`."""
    for item in items:
        chosen = getattr(item, "callspec", None)
        values = chosen.params.values() if chosen and item.path.parent == HERE else ()
        if item.path.name != "test_laws.py" and any(isinstance(one, str) and one in OTHERS for one in values):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    loaded = {}

    def by_name(family):
        if family not in loaded:
            loaded[family] = load_tiny(family, tmp_path_factory.mktemp(family))
        return loaded[family]

    return by_name
