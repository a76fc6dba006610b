"""The files that readers of documents are given."""

from __future__ import annotations

from tests.ingest.conftest import write  # noqa: F401
