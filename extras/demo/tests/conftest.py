"""The store that the tests of the command line make."""

from tests.cli.conftest import _models, folder, model  # noqa: F401
