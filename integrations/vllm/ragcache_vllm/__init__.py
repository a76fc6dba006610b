"""ragcache inside vLLM: stored KV blocks placed in vLLM's paged cache, by a KV connector.

vLLM itself loads `connector` and `worker`, in its own processes. Only these two modules and `scheduling` import vLLM;
the others run without it.
"""

from __future__ import annotations

VLLM_VERSION = "0.32"
"""The vLLM release that the connector is written for: vLLM calls its connector interface experimental."""
