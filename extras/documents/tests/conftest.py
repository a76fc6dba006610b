"""Files for the readers of documents."""

from tests.ingest.conftest import write  # noqa: F401
