"""The model that ingestion's own tests use."""

from tests.ingest.conftest import lm_directory, tokenizer  # noqa: F401
