"""LangChain components over a ragcache store: documents are read once, and questions are answered by fused prefill."""

from typing import TYPE_CHECKING, Any

from langchain_ragcache.attachment import RagCacheDocumentTransformer
from langchain_ragcache.chains import create_fused_documents_chain, create_fused_retrieval_chain
from langchain_ragcache.chat_models import ChatRagCache
from langchain_ragcache.documents import HANDLE_KEY, strip_handles
from langchain_ragcache.embedder import LangChainEmbedder
from langchain_ragcache.embeddings import RagCacheEmbeddings
from langchain_ragcache.messages import document_block
from langchain_ragcache.opening import open_kb
from langchain_ragcache.retrievers import RagCacheRetriever
from langchain_ragcache.vectorstores import RagCacheVectorStore

if TYPE_CHECKING:
    from langchain_ragcache.middleware import RagCacheMiddleware

__all__ = [
    "HANDLE_KEY",
    "ChatRagCache",
    "LangChainEmbedder",
    "RagCacheDocumentTransformer",
    "RagCacheEmbeddings",
    "RagCacheMiddleware",
    "RagCacheRetriever",
    "RagCacheVectorStore",
    "create_fused_documents_chain",
    "create_fused_retrieval_chain",
    "document_block",
    "open_kb",
    "strip_handles",
]


def __getattr__(name: str) -> Any:
    """Import the middleware on first use, because only it needs the package langchain."""
    if name != "RagCacheMiddleware":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from langchain_ragcache.middleware import RagCacheMiddleware

    return RagCacheMiddleware
