"""How vLLM is started over a store: its workers, its configuration and its release."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ragcache.errors import ConfigError
from ragcache_vllm import VLLM_VERSION

WORKERS = {"cpu": "ragcache_vllm.worker.RagCacheCPUWorker", "cuda": "ragcache_vllm.worker.RagCacheGPUWorker"}


def refuse_other_release(version: str) -> None:
    """Raise ConfigError for a version of vLLM that the connector is not written for."""
    if not version.startswith(f"{VLLM_VERSION}."):
        raise ConfigError(
            f"vLLM {version} is installed and ragcache's connector is written for {VLLM_VERSION}: "
            f"pip install 'vllm=={VLLM_VERSION}.*'"
        )


def transfer_config(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return vLLM's `KVTransferConfig` for the connector. extra: the connector's configuration, see
    `RagCacheConnector`
    """
    return {
        "kv_connector": "RagCacheConnector",
        "kv_connector_module_path": "ragcache_vllm.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": dict(extra),
    }
