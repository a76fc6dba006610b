"""First tokens of families at the widths of published models, a few layers of each, against full prefill.

    python -m benchmarks.families --passages 10 --tokens 100 --rounds 10

Weights are random: time and bytes depend on the shape alone. With 4 layers in place of 16 to 40 the ratios are of the
layers' own work; embedding and output are small vocabularies.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from benchmarks import plain
from benchmarks.environment import environment
from benchmarks.options import add_numbers, add_places, measure_and_report, settings_from
from benchmarks.reading import random_prompt
from benchmarks.report import Result
from benchmarks.shapes import build_config
from benchmarks.timing import Ratio, Timing, Variant, alternate, ratio, summarise
from ragcache.fusion.fuse import encode, fuse
from ragcache.models.load import DTYPES

FULL = "transformers: full prefill"
LAYERS = 4
_COMMON = {"vocab_size": 8192, "max_position_embeddings": 8192, "num_hidden_layers": LAYERS}
_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}


def _sizes(hidden: int, inner: int, heads: int, kv_heads: int, head_dim: int, **more: Any) -> dict[str, Any]:
    return {
        **_COMMON, "hidden_size": hidden, "intermediate_size": inner, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": head_dim, **more,
    }  # fmt: skip


# From the config.json of each model's published directory; routed experts are fewer.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama 3.2 1B": ("llama", _sizes(2048, 8192, 32, 8, 64, **_ROPE)),
    "Qwen3 0.6B": ("qwen3", _sizes(1024, 3072, 16, 8, 128, **_ROPE)),
    "Gemma 3 1B": ("gemma3_text", _sizes(1152, 6912, 4, 1, 256, sliding_window=512)),
    "Ministral 3 3B": ("ministral3", _sizes(3072, 9216, 32, 8, 128)),
    "DeepSeek V2 Lite": (
        "deepseek_v2",
        {
            **_COMMON, **_ROPE, "hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408,
            "num_attention_heads": 16, "num_key_value_heads": 16, "kv_lora_rank": 512, "q_lora_rank": None,
            "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 8,
            "num_experts_per_tok": 6, "n_shared_experts": 2, "first_k_dense_replace": 1,
        },
    ),
    "Granite 4.0 H 1B": (
        "granitemoehybrid",
        {
            **_sizes(1536, 4096, 12, 4, 128), "shared_intermediate_size": 4096, "num_local_experts": 0,
            "layer_types": ["mamba", "mamba", "mamba", "attention"], "position_embedding_type": None,
            "mamba_n_heads": 48, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_expand": 2, "mamba_n_groups": 1,
        },
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Settings:
    families: str = ",".join(FAMILIES)
    dtype: str = "float32"
    device: str = "cpu"
    passages: int = 10
    tokens: int = 100
    suffix: int = 30
    rounds: int = 10
    threads: int = 0
    seed: int = 0

    @property
    def name(self) -> str:
        return f"families-{self.dtype}-{self.device.partition(':')[0]}-{self.passages}x{self.tokens}"


def config_of(family: str) -> PreTrainedConfig:
    kind, sizes = FAMILIES[family]
    return CONFIG_MAPPING[kind](**dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")), **sizes)


def measure(settings: Settings, arguments: Sequence[str]) -> Result:
    device = torch.device(settings.device)
    hardware = environment("benchmarks.families", arguments, device)
    timings: dict[str, Timing] = {}
    ratios: dict[str, Ratio] = {}
    figures: dict[str, Any] = {}
    for family in settings.families.split(","):
        lm, model = build_config(config_of(family), family, settings.dtype, device, settings.seed)
        prompt = random_prompt(lm.vocab_size, settings.passages, settings.tokens, settings.suffix, settings.seed)
        blocks = encode(lm, prompt)
        ours = f"{family}: reposition"
        variants = [
            Variant(ours, lambda: fuse(lm, prompt, "reposition", blocks=blocks).next_logits),  # noqa: B023
            Variant(f"{family}: {FULL}", lambda: plain.full_prefill(model, prompt.ids), long=True),  # noqa: B023
        ]
        samples = alternate(variants, settings.rounds, settings.rounds, device, label=family)
        timings |= summarise(samples)
        ratios[f"{ours} / {FULL}"] = ratio(samples, ours, f"{family}: {FULL}")
        figures[f"{family}: a block of {settings.tokens} tokens, bytes a layer"] = blocks[0].num_bytes / LAYERS
    return Result(settings.name, settings, hardware, timings, ratios, figures, [])


def main(arguments: Sequence[str] | None = None) -> Result:
    arguments = sys.argv[1:] if arguments is None else arguments
    parser, default = argparse.ArgumentParser("benchmarks.families", description=__doc__), Settings()
    parser.add_argument("--families", default=default.families, help="separated by commas")
    parser.add_argument("--dtype", choices=DTYPES, default=default.dtype)
    parser.add_argument("--device", default=default.device)
    add_numbers(parser, default, ("passages", "tokens", "suffix", "rounds", "threads", "seed"))
    add_places(parser, None)
    given = parser.parse_args(arguments)
    settings = settings_from(given, Settings)
    return measure_and_report(measure, settings, settings.threads, given.out, arguments)


if __name__ == "__main__":
    main()
