"""The server that its own tests run."""

from __future__ import annotations

from tests.server.conftest import _no_settings_from_outside, agent, kb, lm, made, mini, mini_kb, serve, served  # noqa: F401
