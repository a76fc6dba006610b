"""A chat page over the ragcache server: static files, served from where they lie."""

from __future__ import annotations

from pathlib import Path

# index.html goes to "/", everything beside it to "/static/".
PAGE_DIRECTORY = Path(__file__).resolve().parent / "page"
