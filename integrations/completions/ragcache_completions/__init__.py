"""Raw prompts on ragcache's server: OpenAI's older API, and token ids."""
