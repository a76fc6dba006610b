"""The store that the command line's own tests make."""

from tests.cli.conftest import _models, folder, made, model, store  # noqa: F401
