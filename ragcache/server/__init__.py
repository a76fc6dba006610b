"""OpenAI's HTTP API over a knowledge base (`ragcache serve`)."""
