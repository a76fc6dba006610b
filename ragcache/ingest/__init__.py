"""Readers, chunker, pipeline."""
