"""Readers of PDF, office documents, e-books, notebooks, tables, mail and JSON (extra `documents` for some)."""
