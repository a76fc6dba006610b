"""Readers of office documents, e-books, notebooks, tables, mail and JSON (extra `documents`)."""
