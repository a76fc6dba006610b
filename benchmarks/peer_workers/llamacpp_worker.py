"""llama.cpp through llama-cpp-python, with its prompt cache (`LlamaRAMCache`).

Runs in the environment that `scripts/peers-environment` makes for it, and imports nothing of ragcache. It does the work
of `Llama.create_completion` without the text: before an answer the cached state with the longest common prefix is
loaded, if the context holds a shorter prefix; after the answer the state is kept.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llama_cpp
from llama_cpp import Llama, LlamaRAMCache

from benchmarks.peer_workers.channel import Answer, Prompt, Worker, serve
from benchmarks.peer_workers.gguf_file import write_gguf

BATCH_TOKENS = 512  # llama.cpp's own default


class LlamaCppWorker(Worker):
    def __init__(self, config: dict[str, Any]) -> None:
        path = Path(config.get("gguf") or Path(config["directory"]) / f"{config['dtype']}.gguf")
        if "gguf" not in config:
            write_gguf(Path(config["model"]), path, config["dtype"])
        # The KV of a bfloat16 model is kept in half precision, which is llama.cpp's default.
        kind = llama_cpp.GGML_TYPE_F32 if config["dtype"] == "float32" else llama_cpp.GGML_TYPE_F16
        self._kv_type = "float32" if kind == llama_cpp.GGML_TYPE_F32 else "float16"
        self._threads = int(config["threads"])
        self._flash = bool(config.get("flash", True))
        self._llama = Llama(
            str(path),
            n_ctx=config["max_tokens"],
            n_batch=BATCH_TOKENS,
            n_threads=self._threads,
            n_threads_batch=self._threads,
            type_k=kind,
            type_v=kind,
            flash_attn=self._flash,
            verbose=False,
        )
        self._cache = LlamaRAMCache(capacity_bytes=config["kv_bytes"])
        self._kv_bytes = int(config["kv_bytes"])

    def about(self) -> dict[str, Any]:
        return {
            "versions": {"llama-cpp-python": llama_cpp.__version__},
            "settings": {
                "threads": self._threads,
                "batch_tokens": BATCH_TOKENS,
                "kv_type": self._kv_type,
                "flash_attention": self._flash,
                "prompt_cache_bytes": self._kv_bytes,
            },
        }

    def ask(self, variant: str, prompts: Sequence[Prompt], tokens: Sequence[int], at: Sequence[float]) -> list[Answer]:
        """Answer the prompts in turn, as the Python binding runs a single sequence; seconds include the waiting."""
        started = time.perf_counter()
        return [self._answer(prompt.ids, count, started) for prompt, count in zip(prompts, tokens, strict=True)]

    def _answer(self, prompt: list[int], tokens: int, started: float) -> Answer:
        llama = self._llama
        reused = self._recall(prompt)
        ids: list[int] = []
        first_s = 0.0
        for token in llama.generate(prompt, temp=0.0, repeat_penalty=1.0):
            first_s = first_s or time.perf_counter() - started
            ids.append(int(token))
            if len(ids) == tokens:
                break
        self._cache[prompt + ids] = llama.save_state()
        return Answer(first_s, time.perf_counter() - started, ids, reused)

    def _recall(self, prompt: list[int]) -> int:
        """Load the best cached state, and return the number of the prompt's tokens that the context holds.

        `generate` always reads the last token.
        """
        llama = self._llama
        held = Llama.longest_token_prefix(llama._input_ids.tolist(), prompt)
        try:
            state = self._cache[prompt]
        except KeyError:
            return min(held, len(prompt) - 1)
        cached = Llama.longest_token_prefix(state.input_ids.tolist(), prompt)
        if cached > held:
            llama.load_state(state)
        return min(max(cached, held), len(prompt) - 1)


if __name__ == "__main__":
    serve(LlamaCppWorker)
