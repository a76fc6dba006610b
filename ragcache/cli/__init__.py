"""The `ragcache` command."""
