"""Models of the families, and the engine's stores."""

from tests.engine.conftest import kb  # noqa: F401
from tests.fusion.conftest import family, llama, load, pytest_collection_modifyitems  # noqa: F401
