"""langchain-tests: vector store, over the bundled model, with the embeddings that the suite brings."""

from collections.abc import Iterator

import pytest
from langchain_tests.integration_tests import VectorStoreIntegrationTests

from langchain_ragcache import RagCacheVectorStore


class TestStandardVectorStore(VectorStoreIntegrationTests):
    @pytest.fixture
    def vectorstore(self, tmp_path, mini) -> Iterator[RagCacheVectorStore]:
        with RagCacheVectorStore(tmp_path / "kb", self.get_embeddings(), model=mini) as store:
            yield store
