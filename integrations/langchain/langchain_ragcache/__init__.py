"""LangChain components over a ragcache store: documents are read once, and questions are answered by fused prefill."""

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

__all__ = [
    "HANDLE_KEY",
    "ChatRagCache",
    "LangChainEmbedder",
    "RagCacheDocumentTransformer",
    "RagCacheEmbeddings",
    "RagCacheRetriever",
    "RagCacheVectorStore",
    "create_fused_documents_chain",
    "create_fused_retrieval_chain",
    "document_block",
    "open_kb",
    "strip_handles",
]
