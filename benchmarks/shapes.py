"""Models of known shapes with random weights: speed depends on the shape, not on what was learnt."""

from __future__ import annotations

import copy
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.prose import train_tokenizer
from ragcache.kv.block_key import digest
from ragcache.models.attention import NAME, register
from ragcache.models.graphs import use_graphs
from ragcache.models.language_model import LanguageModel
from ragcache.models.load import DTYPES
from ragcache.models.packed import pack
from ragcache.models.support import inspect


def _llama3_rope(factor: float) -> dict[str, Any]:
    return {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


@dataclass(frozen=True)
class ModelSettings:
    """Settings that benchmarks over a model of random weights share: its shape, where it runs, and how often."""

    benchmark: ClassVar[str]

    shape: str = "SmolLM2-135M"
    dtype: str = "float32"
    device: str = "cpu"
    rounds: int = 10
    threads: int = 0
    seed: int = 0

    @property
    def sizes(self) -> str:
        """Return the sizes that are part of the result's name."""
        return ""

    @property
    def name(self) -> str:
        parts = (self.benchmark, self.shape, self.dtype, self.device.partition(":")[0], self.sizes)
        return "-".join(part for part in parts if part)


VOCABULARY = 16384
SCORE_STD = 2.0
# From the config.json of each model's published directory. "toy" is for tests of the benchmarks themselves.
GRAPH_MEMORY = "RAGCACHE_GRAPH_MEMORY"  # bytes, as the command line's option of that name; 0: no CUDA graphs
SHAPES: dict[str, dict[str, Any]] = {
    "toy": {
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "SmolLM2-135M": {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
    },
    "Llama-3.2-1B": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
        "rope_parameters": _llama3_rope(32.0),
    },
    "Llama-3.1-8B": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
        "rope_parameters": _llama3_rope(8.0),
    },
}


class Built(NamedTuple):
    """The same weights in two models.

    lm:    as ragcache runs it
    plain: as transformers runs it, with scaled_dot_product_attention; without any ragcache code
    """

    lm: LanguageModel
    plain: PreTrainedModel


def build(
    shape: str,
    dtype: str = "float32",
    device: str | torch.device = "cpu",
    tokenizer: PreTrainedTokenizerBase | None = None,
    seed: int = 0,
) -> Built:
    """Build a model of `shape` with random weights, on the device and in its dtype, so that no second copy exists."""
    # No EOS: random weights would say it at some point, and decoding is timed over a given number of tokens.
    config = LlamaConfig(rms_norm_eps=1e-5, bos_token_id=None, eos_token_id=None, **SHAPES[shape])
    torch.manual_seed(seed)
    with torch.device(device):
        plain = AutoModelForCausalLM.from_config(
            config, dtype=DTYPES[dtype], attn_implementation="sdpa", trust_remote_code=False
        )
    plain.eval().requires_grad_(False)
    fingerprint = digest({"shape": shape, "seed": seed, "dtype": dtype, "device": str(device)})
    lm = _wrap(_sharing_weights(plain), tokenizer, fingerprint, shape)
    given = os.environ.get(GRAPH_MEMORY)
    use_graphs(lm, int(given) if given else None)  # as a store does that is opened with it
    return Built(lm, plain)


def write_checkpoint(directory: Path, shape: str, seed: int = 0, *, sharp: bool = False) -> None:
    """Save a float32 model of `shape` with random weights and a tokenizer, in Hugging Face's layout.

    sharp: scale the attention's projections, see `sharpen`
    """
    model = build(shape, seed=seed).plain
    if sharp:
        sharpen(model)
    model.save_pretrained(directory)
    train_tokenizer(vocab_size=min(VOCABULARY, int(SHAPES[shape]["vocab_size"]))).save_pretrained(directory)


@torch.no_grad()
def sharpen(model: PreTrainedModel) -> None:
    """Scale the attention's projections: scores get a standard deviation of about SCORE_STD, values of about 1.

    As drawn, every token attends to all others alike and attention hardly matters: greedy decoding repeats the last
    token, and a peer that rotates keys wrongly would answer the same. Inputs of the projections have unit variance, so
    the variance of a score is the product of the variances of a query's and a key's value. The computation takes as
    long.
    """
    drawn = model.config.initializer_range * model.config.hidden_size**0.5  # standard deviation of what comes out
    for layer in model.model.layers:
        attention = layer.self_attn
        for part in (attention.q_proj, attention.k_proj):
            part.weight *= SCORE_STD**0.5 / drawn
        for part in (attention.v_proj, attention.o_proj):
            part.weight *= 1 / drawn


def _sharing_weights(model: PreTrainedModel) -> PreTrainedModel:
    """Return the same parameters in other modules, so that the models' attention can be set separately."""
    shared = copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})
    register()
    shared.set_attn_implementation(NAME)
    return shared


def _wrap(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, fingerprint: str, name: str
) -> LanguageModel:
    rope, shape = inspect(model, name)
    pack(model)
    return LanguageModel(model, tokenizer, rope, shape, fingerprint, name)
