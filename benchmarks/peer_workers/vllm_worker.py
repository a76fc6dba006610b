"""vLLM on the CPU with its automatic prefix caching: the engine of `LLM`, run step by step on token ids.

Runs in the environment that `scripts/peers-environment` makes for vLLM, and imports nothing of ragcache.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.peer_workers.channel import Answer, Prompt, Worker, serve

GIB = 1 << 30


class VLLMWorker(Worker):
    def __init__(self, config: dict[str, Any]) -> None:
        # vLLM reads these when it is imported. By default it would leave a core free for a server's front end.
        cores = sorted(os.sched_getaffinity(0))[: config["threads"]]
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(max(1, round(config["kv_bytes"] / GIB)))
        os.environ["VLLM_NO_USAGE_STATS"] = "1"
        from vllm import LLM, SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self._sampling = lambda prompt, tokens: SamplingParams(
            max_tokens=tokens,
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.CUMULATIVE,
            extra_args=self.extra(prompt),
        )
        self._llm = LLM(
            config["model"],
            dtype=config["dtype"],
            max_model_len=config["max_tokens"],
            max_num_seqs=max(8, config["askers"]),
            enable_prefix_caching=True,
            disable_log_stats=True,
            seed=0,
            trust_remote_code=False,
            **self.options(),
        )
        self._threads = len(cores)
        self._asked = 0

    def options(self) -> dict[str, Any]:
        """Return further options of the engine."""
        return {}

    def extra(self, prompt: Prompt) -> dict[str, Any] | None:
        """Return the data that a request carries beside its tokens."""
        return None

    def prepare(self, prompt: Prompt) -> int:
        """Prepare a request that has arrived, and return how many of its tokens were read to do so."""
        return 0

    def about(self) -> dict[str, Any]:
        import torch
        import vllm

        config = self._llm.llm_engine.vllm_config
        return {
            "versions": {"vllm": vllm.__version__, "torch": str(torch.__version__)},
            "settings": {
                "threads": self._threads,
                "kv_cache_gib": int(os.environ["VLLM_CPU_KVCACHE_SPACE"]),
                "block_tokens": config.cache_config.block_size,
                "max_batched_tokens": config.scheduler_config.max_num_batched_tokens,
                "compiled": not config.model_config.enforce_eager,
            },
        }

    def ask(self, variant: str, prompts: Sequence[Prompt], tokens: Sequence[int], at: Sequence[float]) -> list[Answer]:
        engine = self._llm.llm_engine
        names = [f"{self._asked + rank}" for rank in range(len(prompts))]
        self._asked += len(prompts)
        due = dict(zip(names, at, strict=True))
        first: dict[str, float] = {}
        done: dict[str, Answer] = {}
        read: dict[str, int] = {}
        waiting = list(zip(names, prompts, tokens, strict=True))[::-1]
        started = time.perf_counter()
        while waiting or engine.has_unfinished_requests():
            while waiting and due[waiting[-1][0]] <= time.perf_counter() - started:
                name, prompt, count = waiting.pop()
                read[name] = self.prepare(prompt)
                engine.add_request(name, {"prompt_token_ids": prompt.ids}, self._sampling(prompt, count))
            if not engine.has_unfinished_requests():
                time.sleep(max(0.0, started + due[waiting[-1][0]] - time.perf_counter()))
                continue
            for output in engine.step():
                now = time.perf_counter() - started - due[output.request_id]
                ids = list(output.outputs[0].token_ids)
                if ids:
                    first.setdefault(output.request_id, now)
                if output.finished:
                    reused = (output.num_cached_tokens or 0) - read[output.request_id]
                    done[output.request_id] = Answer(first[output.request_id], now, ids, reused)
        return [done[name] for name in names]


if __name__ == "__main__":
    serve(VLLMWorker)
