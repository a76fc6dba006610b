"""The store that the command line's own tests make."""

from tests.cli.conftest import _models, folder, model  # noqa: F401
