"""The server that the tests of the server run."""

from tests.server.conftest import _no_settings_from_outside, kb, lm, made, mini_kb, serve, served  # noqa: F401
