"""vLLM workers that run the tokens between loaded passages, in an ordinary step (`--worker-cls`).

vLLM's scheduler counts tokens: if all but R tokens of a prompt are reported as cached, it schedules R tokens and takes
the last R. These workers take the R tokens that have to run, wherever they are. For attention a request of several runs
becomes several rows over the same block table, each as long as its run's end: vLLM's own kernels then give every token
exactly the tokens up to it, without a mask. The keys of all rows are written before any row attends, so a later run
sees the earlier runs of the same step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_worker import Worker as GPUWorker

from ragcache.errors import ConfigError
from ragcache.fusion.layout import Span
from ragcache_vllm.plan import Load
from ragcache_vllm.scheduling import Loads

if TYPE_CHECKING:
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.core.sched.output import SchedulerOutput

Runs = list[Span]
RUNNERS = [f"vllm.v1.worker.{kind}model_runner" for kind in ("cpu_", "gpu_", "cpu.", "gpu.")]
"""Modules of the supported model runners, V1 and V2."""


class _Scattered:
    """A request whose computed tokens are between loaded ones."""

    def __init__(self, load: Load) -> None:
        self._runs = load.computed
        self.num_tokens = load.num_tokens
        self._first = load.num_tokens - sum(run.num_tokens for run in load.computed)

    def step(self, num_computed: int, num_scheduled: int) -> Runs:
        """Return the tokens of a step, given how many tokens vLLM counts as computed."""
        skip, left = num_computed - self._first, num_scheduled
        found = Runs()
        for run in self._runs:
            start = run.start + min(skip, run.num_tokens)
            skip -= start - run.start
            stop = min(run.stop, start + left)
            left -= stop - start
            if start < stop:
                found.append(Span(start, stop))
        return found


class ScatteredPrefill:
    """A mixin for vLLM's model runners, which lets a step compute tokens between loaded tokens.

    _rows: the runs of each request in the step that is being prepared; None for a request that runs as vLLM expects,
           and None altogether if no request is scattered
    """

    _scattered: dict[str, _Scattered]
    _rows: list[Runs | None] | None

    def execute_model(self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        self._rows = None
        self._note(scheduler_output)
        return super().execute_model(scheduler_output, *args, **kwargs)  # type: ignore[misc]

    def _note(self, output: SchedulerOutput) -> None:
        """Remember which requests are scattered. The load of a request is sent here before its tokens run."""
        told = output.kv_connector_metadata
        loads, plain = (told.loads, told.plain) if isinstance(told, Loads) else ((), ())
        for name in (*output.finished_req_ids, *plain, *(load.request_id for load in loads)):
            self._scattered.pop(name, None)
        self._scattered |= {load.request_id: _Scattered(load) for load in loads if load.computed}

    def _find_rows(self, names: Sequence[str], computed: Sequence[int], counts: Sequence[int]) -> None:
        """Find the runs of each request in this step.

        computed: tokens of each request that vLLM counts as computed
        counts: tokens of each request in this step
        """
        rows: list[Runs | None] = []
        for name, done, count in zip(names, computed, counts, strict=True):
            scattered = self._scattered.get(name)
            is_prompt = scattered is not None and done < scattered.num_tokens
            rows.append(scattered.step(done, count) if scattered is not None and is_prompt else None)
        self._rows = rows if any(row is not None for row in rows) else None

    def _place_tokens(
        self, token_ids: Tensor, requests: Sequence[int], counts: Sequence[int], positions: Tensor, ids: Tensor
    ) -> None:
        """Replace positions and ids: vLLM prepared those of each sequence's end, not those of the runs.

        token_ids: ids of all sequences, a row for each
        requests:  for each request of this step, its row
        counts:    tokens of each request in this step
        positions, ids: of the step's tokens; changed in place
        """
        begin = 0
        for request, runs, count in zip(requests, self._rows or (), counts, strict=True):
            if runs is not None:
                places = torch.cat([torch.arange(run.start, run.stop) for run in runs])
                positions[begin : begin + count] = places.to(positions.device)
                ids[begin : begin + count] = token_ids[request, places.to(token_ids.device)].to(ids.device)
            begin += count

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        super().initialize_kv_cache(*args, **kwargs)  # type: ignore[misc]
        for builder in self._builders():
            self._split_rows_of(builder)

    def _builders(self) -> Iterator[Any]:
        for groups in self.attn_groups:  # type: ignore[attr-defined]
            for group in groups:
                yield from group.metadata_builders

    def _split_rows_of(self, builder: Any) -> None:
        """Make this builder build metadata with a row for each run. Only this object is changed, not its class."""
        build = builder.build

        def by_run(
            common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, *args: Any, **more: Any
        ) -> Any:
            if self._rows is None:
                return build(common_prefix_len, common_attn_metadata, *args, **more)
            return build(0, split_rows(common_attn_metadata, self._rows), *args, **more)  # rows share no prefix

        builder.build = by_run


class ScatteredPrefillV1(ScatteredPrefill):
    """A mixin for a V1 model runner."""

    def _prepare_inputs(self, scheduler_output: SchedulerOutput, num_scheduled_tokens: Any) -> Any:
        prepared = super()._prepare_inputs(scheduler_output, num_scheduled_tokens)  # type: ignore[misc]
        runner: Any = self
        batch, counts = runner.input_batch, [int(count) for count in num_scheduled_tokens]
        self._find_rows(batch.req_ids, batch.num_computed_tokens_cpu[: len(counts)].tolist(), counts)
        if self._rows is not None:
            positions, ids = runner.positions, runner.input_ids.gpu
            self._place_tokens(batch.token_ids_cpu_tensor, range(len(counts)), counts, positions, ids)
            starts = runner.query_start_loc.gpu[: batch.num_reqs + 1]
            batch.block_table.compute_slot_mapping(batch.num_reqs, starts, positions[: sum(counts)])
        return prepared


class ScatteredPrefillV2(ScatteredPrefill):
    """A mixin for a V2 model runner, which maps positions to slots after it has prepared its inputs."""

    def prepare_inputs(self, *args: Any, **kwargs: Any) -> Any:
        batch = super().prepare_inputs(*args, **kwargs)  # type: ignore[misc]
        runner: Any = self
        counts = batch.num_scheduled_tokens.tolist()
        self._find_rows(batch.req_ids, batch.num_computed_tokens_np.tolist(), counts)
        if self._rows is not None:
            token_ids, requests = runner.req_states.all_token_ids.gpu, batch.idx_mapping_np.tolist()
            self._place_tokens(token_ids, requests, counts, batch.positions, batch.input_ids)
        return batch


def split_rows(common: CommonAttentionMetadata, rows: Sequence[Runs | None]) -> CommonAttentionMetadata:
    """Return the metadata of a batch in which every run is a separate row, over its request's block table.

    rows: the runs of each request; None for a request that keeps its single row
    """
    starts = common.query_start_loc_cpu.tolist()
    lengths = common.seq_lens.tolist()
    index, queries, ends = list[int](), [0], list[int]()
    for row, (start, stop) in enumerate(pairwise(starts[: len(rows) + 1])):
        for run in rows[row] or [Span(lengths[row] - (stop - start), lengths[row])]:
            index.append(row)
            queries.append(queries[-1] + run.num_tokens)
            ends.append(run.stop)
    query_start_loc = torch.tensor(queries, dtype=common.query_start_loc_cpu.dtype)
    which = torch.tensor(index)
    prefilling = common.is_prefilling
    return replace(
        common,
        query_start_loc=query_start_loc.to(common.query_start_loc.device),
        query_start_loc_cpu=query_start_loc,
        seq_lens=torch.tensor(ends, dtype=common.seq_lens.dtype, device=common.seq_lens.device),
        seq_lens_cpu_upper_bound=torch.tensor(ends, dtype=torch.int32),
        num_reqs=len(index),
        max_query_len=max(b - a for a, b in pairwise(queries)),
        max_seq_len=max(ends),
        block_table_tensor=common.block_table_tensor[which.to(common.block_table_tensor.device)],
        is_prefilling=None if prefilling is None else prefilling[which.to(prefilling.device)],
        req_idx=None if common.req_idx is None else common.req_idx[index],
        _token_to_req_indices_cache=None,
    )


def _scatter(worker: Any) -> None:
    """Add the mixin to a worker's runner. Raises ConfigError for a runner of another kind."""
    runner: Any = worker.model_runner
    mixin = ScatteredPrefillV2 if worker.use_v2_model_runner else ScatteredPrefillV1
    plain = type(runner)
    if plain.__module__ not in RUNNERS:
        raise ConfigError(
            f"vLLM runs the model with {plain.__module__}.{plain.__qualname__}, and stored blocks need one of "
            f"{', '.join(RUNNERS)}: leave out what asks for another"
        )
    runner.__class__ = type(f"Scattered{plain.__name__}", (mixin, plain), {})
    vars(runner).update(_scattered={}, _rows=None)


class RagCacheCPUWorker(CPUWorker):  # type: ignore[misc]
    """vLLM's CPU worker, which also runs tokens between loaded ones."""

    def init_device(self) -> None:
        super().init_device()
        _scatter(self)


class RagCacheGPUWorker(GPUWorker):  # type: ignore[misc]
    """vLLM's GPU worker, which also runs tokens between loaded ones."""

    def init_device(self) -> None:
        super().init_device()
        _scatter(self)
