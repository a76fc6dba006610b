"""langchain-tests: retriever."""

from langchain_doubles import OverAStore
from langchain_registry import QUESTION
from langchain_tests.integration_tests import RetrieversIntegrationTests

from langchain_ragcache import RagCacheRetriever


class TestStandardRetriever(OverAStore, RetrieversIntegrationTests):
    retriever_constructor = RagCacheRetriever
    retriever_query_example = QUESTION
