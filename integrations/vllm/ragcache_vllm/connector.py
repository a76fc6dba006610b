"""ragcache's KV connector for vLLM: stored blocks are loaded instead of being computed by prefill.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "RagCacheConnector", "kv_role": "kv_both",
        "kv_connector_module_path": "ragcache_vllm.connector", "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"store": "kb", "fingerprint": "..."}}'

`ragcache vllm` writes this command line. vLLM makes a connector in its scheduler and another in every worker; this
class passes each call to the side that it runs on.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
import vllm
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, KVConnectorRole
from vllm.model_executor.models.utils import extract_layer_index

from ragcache.errors import ConfigError
from ragcache.kv.lane import Lane
from ragcache_vllm.blocks import StoredBlocks
from ragcache_vllm.command import refuse_other_release
from ragcache_vllm.merged_adapter import refuse_other_checkpoint
from ragcache_vllm.placing import PagedLayer, Shard, WorkerSide
from ragcache_vllm.probe import is_kernel_right
from ragcache_vllm.rope import rope_of
from ragcache_vllm.scheduling import Loads, SchedulerSide

if TYPE_CHECKING:
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


log = logging.getLogger("vllm.ragcache")


class RagCacheConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """A connector that loads stored blocks into vLLM's pages.

    Extra configuration: `store` (a store's directory), `fingerprint` (of the model in its block keys), `checkpoint`
    (digest of the files that it was computed with), `load` ("step": within the step that needs them, layer by layer;
    "ahead": by threads, while other requests go on), `remote`, `owner`, `disk_bytes` (see `StoredBlocks`).

    Raises ConfigError for another release of vLLM, for settings that it cannot serve and for a store that does not
    exist, ModelMismatchError for a model other than the store's.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        _check(vllm_config, kv_cache_config)
        option = self._kv_transfer_config.get_from_extra_config
        root, fingerprint, load = option("store", ""), option("fingerprint", ""), option("load", "step")
        if load not in ("step", "ahead"):
            raise ConfigError(f"load {load!r} is unknown; choose step or ahead")
        if not fingerprint:
            raise ConfigError("the connector was given no fingerprint; start vLLM with `ragcache vllm`")
        self._blocks = StoredBlocks(root, option("remote", ""), option("owner", ""), option("disk_bytes", None))
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._begun: KVConnectorMetadata | None = None
        if role == KVConnectorRole.SCHEDULER:
            _check_model(vllm_config.model_config.model, option("checkpoint", ""))
            page_tokens, is_async = vllm_config.cache_config.block_size, load == "ahead"
            self._scheduler = SchedulerSide(fingerprint, self._blocks.verify, page_tokens, is_async=is_async)

    # Scheduler

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        self._scheduling.bind(kv_cache_manager)

    def on_new_request(self, request: Request) -> None:
        self._scheduling.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._scheduling.count_loaded(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        self._scheduling.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return self._scheduling.begin(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        if connector_output.invalid_block_ids:
            self._scheduling.failed(connector_output.invalid_block_ids)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return False, self._scheduling.finished(request)

    @property
    def _scheduling(self) -> SchedulerSide:
        if self._scheduler is None:
            raise RuntimeError("this connector is a worker's")
        return self._scheduler

    # Worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        config = self._vllm_config
        static = config.compilation_config.static_forward_context
        layers = {name: PagedLayer(extract_layer_index(name), static[name]) for name in kv_caches}
        device = next(iter(layers.values())).device
        model, page_tokens = config.model_config, config.cache_config.block_size
        rope = rope_of(model.hf_config, str(model.model), device)
        shard = Shard(get_tensor_model_parallel_rank(), config.parallel_config.tensor_parallel_size)
        lane = Lane(device) if device.type == "cuda" else None
        by_kernel = is_kernel_right(list(layers.values()), rope, shard, page_tokens, model.dtype)
        self._worker = WorkerSide(self._blocks.get, rope, shard, page_tokens, lane, by_kernel=by_kernel)
        self._worker.register(layers, model.dtype, model.max_model_len)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        self._begin()

    def wait_for_layer_load(self, layer_name: str) -> None:
        # In a step for which vLLM expects no load it calls start_load_kv only after the forward pass. Such a step may
        # have a load: onto later pages of a request that was loaded in part.
        self._begin()
        if self._worker is not None:
            self._worker.place(layer_name)

    def _begin(self) -> None:
        """Begin this step's loads, unless they have begun."""
        told = self._get_connector_metadata()
        if told is not self._begun and isinstance(told, Loads) and self._worker is not None:
            self._begun = told
            self._worker.begin(told.loads)

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: AttentionMetadata, **kwargs: Any
    ) -> None:
        """Do nothing: blocks are made at ingestion. vLLM's keys are rotated, and rounded to its number format."""

    def wait_for_save(self) -> None:
        if self._worker is not None:
            self._worker.end()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return None, (self._worker.finished() if self._worker is not None else None) or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.failed_pages() if self._worker is not None else set()

    def shutdown(self) -> None:
        for side in (self._scheduler, self._worker):
            if side is not None:
                side.close()
        self._blocks.close()

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Return True, because layers are placed between the attention of other layers, which no CUDA graph of a
        whole pass can hold.
        """
        return True


def _check_model(name: str, checkpoint: str) -> None:
    """Raise ModelMismatchError if the model's files are not those of the blocks. Warn if the digest is unknown ("")."""
    if checkpoint:
        refuse_other_checkpoint(name, checkpoint)
    else:
        log.warning("the store has no digest of its model's files: ask a question without an engine, then start again")


def _check(config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Raise ConfigError for a configuration that cannot be served, with a way out."""
    refuse_other_release(vllm.__version__)
    if len(kv_cache_config.kv_cache_groups) > 1:
        raise ConfigError("the layers have pages of several kinds; start vLLM with --disable-hybrid-kv-cache-manager")
    if config.model_config.use_mla:
        raise ConfigError(f"{config.model_config.model} caches latent keys (MLA), which stored blocks are not")
    if config.speculative_config is not None:
        raise ConfigError("speculative decoding is not supported beside stored blocks; leave --speculative-config out")
    transfer = config.kv_transfer_config
    if transfer is not None and transfer.kv_load_failure_policy != "recompute":
        raise ConfigError('set kv_load_failure_policy to "recompute": a damaged block then costs time, not the answer')
