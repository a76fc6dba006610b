"""The server that the tests of the server run."""

from tests.server.conftest import _no_settings_from_outside, agent, kb, lm, made, serve, served  # noqa: F401
