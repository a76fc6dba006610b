"""The `ragcache` command."""

from ragcache.cli.app import main

__all__ = ["main"]
