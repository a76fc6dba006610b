"""langchain-tests: embeddings."""

from typing import Any

import pytest
from langchain_tests.integration_tests import EmbeddingsIntegrationTests
from langchain_tests.unit_tests import EmbeddingsUnitTests

import ragcache as rc
from langchain_ragcache import RagCacheEmbeddings


class _OfAStore:
    kb: rc.RagCache

    @pytest.fixture(autouse=True)
    def _kb(self, registry) -> None:
        self.kb = registry

    @property
    def embeddings_class(self) -> type[RagCacheEmbeddings]:
        return RagCacheEmbeddings

    @property
    def embedding_model_params(self) -> dict[str, Any]:
        return {"kb": self.kb}


class TestStandardEmbeddingsUnit(_OfAStore, EmbeddingsUnitTests):
    @property
    def init_from_env_params(self) -> tuple[dict[str, str], dict[str, Any], dict[str, Any]]:
        return {"RAGCACHE_EMBEDDER": "minilm"}, {}, {"model": "minilm"}


class TestStandardEmbeddings(_OfAStore, EmbeddingsIntegrationTests):
    pass
