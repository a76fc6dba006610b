"""Options of the engine, which are part of its address: "llama.cpp:n_ctx=16384,kv=q8_0"."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Self

from ragcache.errors import ConfigError, check_choice, check_least

NAME = "llama.cpp"
KV_TYPES = {"f16": 1, "q8_0": 8}
"""Names of KV types, and ggml's numbers for them."""
NUMBERS, HELD, GUARD = 3, 1, 2
"""A `CellSequence` of number n has NUMBERS sequences of llama.cpp: n itself, n + HELD for passages until the text
before them has run, and n + GUARD, which has all of its cells if layers have a sliding window."""


@dataclass(frozen=True)
class LlamaOptions:
    """Options of a llama.cpp context.

    n_ctx:        tokens that all answers and kept prompts hold together; 0: 8192, or the model's context if shorter
    n_gpu_layers: layers that run on the GPU, if llama-cpp-python was built for one; -1: all
    threads:      0: as many as PyTorch uses
    kv:           type of keys and values: f16, or q8_0, which takes half of the memory
    flash:        1: flash attention; 0: none, which q8_0 does not allow; -1: on a GPU, and for q8_0
    parallel:     prompts that are answered at the same time; more of them wait
    """

    n_ctx: int = 0
    n_gpu_layers: int = -1
    threads: int = 0
    kv: str = "f16"
    flash: int = -1
    parallel: int = 8

    def __post_init__(self) -> None:
        check_choice("kv", self.kv, tuple(KV_TYPES))
        check_choice("flash", str(self.flash), ("-1", "0", "1"))
        check_least("n_ctx", self.n_ctx, 0)
        check_least("threads", self.threads, 0)
        check_least("n_gpu_layers", self.n_gpu_layers, -1)
        check_least("parallel", self.parallel, 1)
        if self.kv != "f16" and self.flash == 0:
            raise ConfigError(f"kv={self.kv} needs flash attention in llama.cpp; leave flash=0 out", "engine")

    def flash_attention(self, *, on_gpu: bool) -> bool:
        """Return whether the context uses flash attention.

        On a CPU llama.cpp's flash attention is fast for passes of 64 tokens or more. A question's few tokens, and each
        token of an answer, take three to six times as long with it as without.
        """
        return on_gpu or self.kv != "f16" if self.flash == -1 else bool(self.flash)

    @classmethod
    def of(cls, address: str) -> Self:
        """Read the options of an address. Raises ConfigError that names the wrong option."""
        _, _, rest = address.partition(":")
        kinds: dict[str, type[int | str]] = {field.name: str if field.name == "kv" else int for field in fields(cls)}
        given: dict[str, int | str] = {}
        for part in filter(None, rest.split(",")):
            name, _, value = part.partition("=")
            if name not in kinds:
                raise ConfigError(
                    f"engine {address!r} has no option {name!r}; the options are {', '.join(kinds)}, as in "
                    f"{NAME}:n_ctx=16384,kv=q8_0",
                    "engine",
                )
            try:
                given[name] = kinds[name](value)
            except ValueError as error:
                raise ConfigError(f"engine {address!r}: {name}={value} is no number", "engine") from error
        return cls(**given)  # type: ignore[arg-type]
