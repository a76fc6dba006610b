"""Models of the families, and stores of the engine."""

from tests.engine.conftest import kb  # noqa: F401
from tests.fusion.conftest import family, llama, load, pytest_collection_modifyitems  # noqa: F401
