"""Embedder, FAISS index, retriever."""
