"""transformers alone: `generate` with a new cache for every question."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

from benchmarks.peer_workers.channel import Answer, Prompt, Worker, serve
from benchmarks.plain import Clock


class TransformersWorker(Worker):
    def __init__(self, config: dict[str, Any]) -> None:
        torch.set_num_threads(config["threads"])
        dtype = getattr(torch, config["dtype"])
        self._model = AutoModelForCausalLM.from_pretrained(
            config["model"], dtype=dtype, attn_implementation="sdpa", trust_remote_code=False
        )
        self._model.eval()

    def about(self) -> dict[str, Any]:
        return {
            "versions": {"transformers": transformers.__version__, "torch": str(torch.__version__)},
            "settings": {"attention": "sdpa", "threads": torch.get_num_threads()},
        }

    def ask(self, variant: str, prompts: Sequence[Prompt], tokens: Sequence[int], at: Sequence[float]) -> list[Answer]:
        """Answer prompts of equal length as a batch, others in turn; seconds include the waiting."""
        started = time.perf_counter()
        if len({len(prompt.ids) for prompt in prompts}) == 1:
            return self._batch(prompts, tokens[0], started)
        return [answer for prompt in prompts for answer in self._batch([prompt], tokens[0], started)]

    def _batch(self, prompts: Sequence[Prompt], tokens: int, started: float) -> list[Answer]:
        batch = torch.tensor([prompt.ids for prompt in prompts])
        clock = Clock()
        out = self._model.generate(
            batch, attention_mask=torch.ones_like(batch), max_new_tokens=tokens, do_sample=False, streamer=clock
        )
        first, total = clock.started + clock.seconds[0] - started, time.perf_counter() - started
        return [Answer(first, total, row.tolist(), 0) for row in out[:, batch.shape[1] :]]


if __name__ == "__main__":
    serve(TransformersWorker)
