"""What the fork server of `forked` imports once for all of its children."""

from contextlib import suppress
from importlib import import_module

for name in ("ragcache.engine.kb", "ragcache.server.run", "transformers.generation", "faiss", "obstore.store", "redis"):
    with suppress(ImportError):
        import_module(name)
