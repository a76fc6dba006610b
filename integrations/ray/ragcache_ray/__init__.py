"""Ingestion on a Ray cluster: `kb.ingest(..., ray=...)`, `ragcache ingest --ray`."""
