"""The files that readers of documents are given."""

from tests.ingest.conftest import write  # noqa: F401
