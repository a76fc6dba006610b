"""The server that its own tests run."""

from tests.server.conftest import _no_settings_from_outside, kb, lm, made, mini_kb, serve, served  # noqa: F401
