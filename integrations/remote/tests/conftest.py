"""The stores that the engine's own tests use."""

from collections.abc import Iterator

import pytest

from ragcache.seal import VARIABLE
from tests.engine.conftest import kb  # noqa: F401
from tests.store.conftest import url  # noqa: F401


@pytest.fixture(autouse=True)
def _one_key() -> Iterator[None]:
    """Machines that share a remote share the key."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, "5e" * 32)
        yield
