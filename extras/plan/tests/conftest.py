"""The store that the command line's own tests make."""

from __future__ import annotations

from tests.cli.conftest import _models, folder, made, model, store  # noqa: F401
