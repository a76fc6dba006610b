"""What ragcache's server answers without a chat: raw prompts, token ids, searches and rankings."""
