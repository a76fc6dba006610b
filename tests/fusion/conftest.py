"""Models of the families, loaded when a test asks for one."""

from __future__ import annotations

import pytest
from families import load_tiny


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    loaded = {}

    def by_name(family):
        if family not in loaded:
            loaded[family] = load_tiny(family, tmp_path_factory.mktemp(family))
        return loaded[family]

    return by_name
