"""OpenAI's HTTP API over one knowledge base (`ragcache serve`). Needs the extra `server`."""
