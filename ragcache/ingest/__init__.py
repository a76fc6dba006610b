"""Ingestion: readers, chunker, pipeline."""
