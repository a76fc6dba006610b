"""langchain-tests: retriever."""

from typing import Any

import pytest
from langchain_tests.integration_tests import RetrieversIntegrationTests

import ragcache as rc
from langchain_ragcache import RagCacheRetriever


class TestStandardRetriever(RetrieversIntegrationTests):
    kb: rc.RagCache

    @pytest.fixture(autouse=True)
    def _kb(self, registry) -> None:
        self.kb = registry

    @property
    def retriever_constructor(self) -> type[RagCacheRetriever]:
        return RagCacheRetriever

    @property
    def retriever_constructor_params(self) -> dict[str, Any]:
        return {"kb": self.kb}

    @property
    def retriever_query_example(self) -> str:
        return "Which club does Jonas Lansen belong to?"
