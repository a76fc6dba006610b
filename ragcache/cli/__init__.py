"""The `ragcache` command."""

from ragcache.cli.app import main as main
