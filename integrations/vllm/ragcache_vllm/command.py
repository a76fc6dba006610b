"""The command line that starts vLLM over a store."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ragcache.errors import ConfigError, StoreNotFoundError
from ragcache_vllm import VLLM_VERSION
from ragcache_vllm.request_layout import served_name

WORKERS = {"cpu": "ragcache_vllm.worker.RagCacheCPUWorker", "cuda": "ragcache_vllm.worker.RagCacheGPUWorker"}
GRAMMARS = {"backend": "guidance", "disable_any_whitespace": True}
"""Options that constrain answers as the embedded engine does: by llguidance, and JSON on a single line, because a model
that may write any white space between tokens of JSON may never stop writing it.
"""


@dataclass(frozen=True)
class EngineSettings:
    """Settings with which vLLM is started.

    store:   the store's directory
    host, port: address on which vLLM listens
    device:  selects the worker that runs the model
    load:    "step": blocks are loaded within the step that needs them, layer by layer; "ahead": by threads, while other
             requests go on
    more:    further arguments of vLLM's own server, which override those made here
    disk_bytes: budget of the copies of a remote's blocks; None: unlimited
    """

    store: Path
    host: str = "127.0.0.1"
    port: int = 8100
    device: Literal["cpu", "cuda"] = "cpu"
    load: Literal["step", "ahead"] = "step"
    more: Sequence[str] = ()
    disk_bytes: int | None = None


def vllm_command(settings: EngineSettings, bound: Mapping[str, Any], model: str) -> list[str]:
    """Return the command of vLLM's server with the connector, the store's model and all options that these need.

    bound: properties that the store is bound to (`DocumentStore.properties`)
    model: the model's directory or hub id

    Raises StoreNotFoundError for a store into which nothing was encoded.
    """
    if "fingerprint" not in bound:
        raise StoreNotFoundError(
            f"{settings.store}: no model has encoded anything into this store; ingest documents first"
        )
    extra = {
        "store": str(settings.store.resolve()),
        "fingerprint": bound["fingerprint"],
        "checkpoint": bound.get("checkpoint", ""),
        "load": settings.load,
    }
    if "remote" in bound:  # without credentials, which are in the environment
        extra |= {"remote": bound["remote"], "owner": bound.get("database_id", ""), "disk_bytes": settings.disk_bytes}
    options = {
        "--model": model,
        "--dtype": str(bound.get("model_dtype", "auto")),
        "--host": settings.host,
        "--port": str(settings.port),
        "--worker-cls": WORKERS[settings.device],
        "--kv-transfer-config": json.dumps(transfer_config(extra)),
        "--structured-outputs-config": json.dumps(GRAMMARS),
    }
    server = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    pairs = [part for pair in options.items() for part in pair]
    names = ["--served-model-name", str(bound.get("model_name", model)), served_name(str(bound["fingerprint"]))]
    flags = ["--disable-hybrid-kv-cache-manager", "--enable-prompt-tokens-details"]
    return [*server, *pairs, *names, *flags, *settings.more]


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
