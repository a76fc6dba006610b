"""Anthropic's Messages API on ragcache's server: its clients get answers from the store's documents."""
