"""The stores that the engine's own tests use."""

from tests.engine.conftest import kb  # noqa: F401
from tests.store.conftest import url  # noqa: F401
