"""What ragcache costs, against plain transformers. See README.md here."""
