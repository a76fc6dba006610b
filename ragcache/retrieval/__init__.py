"""Retrieval: embedder, vector index, retriever, reranker."""
