"""The server that its own tests run."""

from tests.server.conftest import *  # noqa: F403
from tests.server.conftest import _no_settings_from_outside  # noqa: F401
