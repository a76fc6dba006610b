"""The model that the tests of ingestion use."""

from tests.ingest.conftest import lm_directory, tokenizer  # noqa: F401
