"""Routes of ragcache's server for raw prompts, token ids, searches and rankings."""
