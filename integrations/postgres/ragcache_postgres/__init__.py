"""Vectors in the PostgreSQL database that holds the documents, by the extension pgvector."""
