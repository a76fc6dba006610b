"""ragcache inside vLLM: stored KV blocks placed in vLLM's paged cache, by a KV connector.

Nothing here is imported without the extra `vllm`. `layout` and `plan` need no vLLM; `connector` and `worker` are loaded
by vLLM itself, in its own processes.
"""

from __future__ import annotations

VLLM_VERSION = "0.32"
"""The vLLM release that the connector is written for: vLLM calls its connector interface experimental."""
