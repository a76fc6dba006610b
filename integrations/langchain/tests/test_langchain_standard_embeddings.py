"""langchain-tests: embeddings."""

from typing import Any

from langchain_doubles import OverAStore
from langchain_tests.integration_tests import EmbeddingsIntegrationTests
from langchain_tests.unit_tests import EmbeddingsUnitTests

from langchain_ragcache import RagCacheEmbeddings


class TestStandardEmbeddingsUnit(OverAStore, EmbeddingsUnitTests):
    embeddings_class = RagCacheEmbeddings

    @property
    def init_from_env_params(self) -> tuple[dict[str, str], dict[str, Any], dict[str, Any]]:
        return {"RAGCACHE_EMBEDDER": "minilm"}, {}, {"model": "minilm"}


class TestStandardEmbeddings(OverAStore, EmbeddingsIntegrationTests):
    embeddings_class = RagCacheEmbeddings
