"""vLLM workers that run the tokens between loaded passages, in one ordinary step (`--worker-cls`).

vLLM's scheduler counts tokens: told that all but R of a prompt are in its cache, it schedules R tokens and takes the
last R. These workers take the R tokens that have to run, wherever they stand. For attention a request of several runs
becomes several rows over one and the same block table, each as long as its run's end: vLLM's own kernels then give
every token exactly what stands at or before it, without a mask. The keys of all rows are written before any row
attends, so a later run sees the earlier ones of the same step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker as GPUWorker

from ragcache.errors import ConfigError
from ragcache.kv.request_layout import Span
from ragcache_vllm.scheduling import Load, Loads

if TYPE_CHECKING:
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.core.sched.output import SchedulerOutput

Runs = list[Span]


class _Scattered:
    """One request whose computed tokens stand between loaded ones."""

    def __init__(self, load: Load) -> None:
        self._runs = load.computed
        self.num_tokens = load.num_tokens
        self._first = load.num_tokens - sum(run.num_tokens for run in load.computed)

    def step(self, num_computed: int, num_scheduled: int) -> Runs:
        """The tokens of a step, where vLLM counts so many as computed already."""
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
    """Mixed into a V1 model runner.

    _rows: of the step that is being prepared, the runs of each request; None for a request that runs as vLLM expects.
           None altogether where no request is scattered
    """

    _scattered: dict[str, _Scattered]
    _rows: list[Runs | None] | None

    def execute_model(self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        self._note(scheduler_output)
        return super().execute_model(scheduler_output, *args, **kwargs)  # type: ignore[misc]

    def _note(self, output: SchedulerOutput) -> None:
        """Remember which requests are scattered: of an asynchronous load, workers hear before its tokens run."""
        told = output.kv_connector_metadata
        loads, plain = (told.loads, told.plain) if isinstance(told, Loads) else ((), ())
        for name in (*output.finished_req_ids, *plain, *(load.request_id for load in loads)):
            self._scattered.pop(name, None)
        self._scattered |= {load.request_id: _Scattered(load) for load in loads if load.computed}

    def _prepare_inputs(self, scheduler_output: SchedulerOutput, num_scheduled_tokens: Any) -> Any:
        prepared = super()._prepare_inputs(scheduler_output, num_scheduled_tokens)  # type: ignore[misc]
        counts = [int(count) for count in num_scheduled_tokens]
        self._rows = self._scattered_rows(counts)
        if self._rows is not None:
            self._place_tokens(counts)
        return prepared

    def _scattered_rows(self, counts: Sequence[int]) -> list[Runs | None] | None:
        batch: Any = self.input_batch  # type: ignore[attr-defined]
        rows: list[Runs | None] = []
        for index, name in enumerate(batch.req_ids):
            computed, scattered = int(batch.num_computed_tokens_cpu[index]), self._scattered.get(name)
            is_prompt = scattered is not None and computed < scattered.num_tokens
            rows.append(scattered.step(computed, counts[index]) if scattered is not None and is_prompt else None)
        return rows if any(row is not None for row in rows) else None

    def _place_tokens(self, counts: Sequence[int]) -> None:
        """Put the step's true positions and ids where vLLM put those of each sequence's end."""
        runner: Any = self
        batch, begin = runner.input_batch, 0
        for index, (runs, count) in enumerate(zip(self._rows or (), counts, strict=True)):
            if runs is not None:
                positions = torch.cat([torch.arange(run.start, run.stop) for run in runs])
                runner.positions[begin : begin + count] = positions.to(runner.positions.device)
                ids = batch.token_ids_cpu_tensor[index, positions]
                runner.input_ids.gpu[begin : begin + count] = ids.to(runner.input_ids.gpu.device)
            begin += count
        starts = runner.query_start_loc.gpu[: batch.num_reqs + 1]
        batch.block_table.compute_slot_mapping(batch.num_reqs, starts, runner.positions[:begin])

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        super().initialize_kv_cache(*args, **kwargs)  # type: ignore[misc]
        for builder in self._builders():
            self._split_rows_of(builder)

    def _builders(self) -> Iterator[Any]:
        for groups in self.attn_groups:  # type: ignore[attr-defined]
            for group in groups:
                yield from group.metadata_builders

    def _split_rows_of(self, builder: Any) -> None:
        """Have this object build its metadata of one row a run. Its class, and all others, stay as they are."""
        build = builder.build

        def by_run(
            common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, *args: Any, **more: Any
        ) -> Any:
            if self._rows is None:
                return build(common_prefix_len, common_attn_metadata, *args, **more)
            return build(0, split_rows(common_attn_metadata, self._rows), *args, **more)  # rows share no prefix

        builder.build = by_run


def split_rows(common: CommonAttentionMetadata, rows: Sequence[Runs | None]) -> CommonAttentionMetadata:
    """The metadata of a batch in which every run is a row of its own, over its request's block table."""
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
    )


class _ScatteredCPURunner(ScatteredPrefill, CPUModelRunner):  # type: ignore[misc]
    pass


class _ScatteredGPURunner(ScatteredPrefill, GPUModelRunner):  # type: ignore[misc]
    pass


def _scatter(worker: Any, plain: type, scattered: type) -> None:
    """Give a worker's runner its second nature. Raises ConfigError for a runner of another kind."""
    runner: Any = worker.model_runner
    if type(runner) is not plain:
        raise ConfigError(
            f"vLLM runs the model with {type(runner).__name__} and stored blocks need {plain.__name__}; "
            "set VLLM_USE_V2_MODEL_RUNNER=0"
        )
    runner.__class__ = scattered
    vars(runner).update(_scattered={}, _rows=None)


class RagCacheCPUWorker(CPUWorker):  # type: ignore[misc]
    """vLLM's CPU worker, which also runs tokens between loaded ones."""

    def init_device(self) -> None:
        super().init_device()
        _scatter(self, CPUModelRunner, _ScatteredCPURunner)


class RagCacheGPUWorker(GPUWorker):  # type: ignore[misc]
    """vLLM's GPU worker with the V1 runner, which also runs tokens between loaded ones."""

    def init_device(self) -> None:
        super().init_device()
        _scatter(self, GPUModelRunner, _ScatteredGPURunner)
