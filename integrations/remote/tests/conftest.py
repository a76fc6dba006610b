"""The stores that the engine's own tests use."""

import pytest

from ragcache.seal import VARIABLE
from tests.engine.conftest import kb  # noqa: F401
from tests.store.conftest import url  # noqa: F401


@pytest.fixture(autouse=True)
def _one_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Machines that share a remote share the key."""
    monkeypatch.setenv(VARIABLE, "5e" * 32)
