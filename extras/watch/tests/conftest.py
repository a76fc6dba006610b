"""The store that the tests of the command line make."""

from tests.cli.conftest import _models, folder, made, model, store  # noqa: F401
