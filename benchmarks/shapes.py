"""Models of known shapes with random weights, as speed depends on the shape, not on training."""

from __future__ import annotations

import copy
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

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


def _llama(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, **more: Any) -> dict[str, Any]:
    """Return a Llama's sizes: hidden and inner width, layers, heads, and heads of keys and values."""
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers}
    return {**sizes, "num_attention_heads": heads, "num_key_value_heads": kv_heads, "tie_word_embeddings": True, **more}


def _llama3(factor: float) -> dict[str, Any]:
    """Return the settings that all models of Llama 3 share. factor: of the rotary scaling"""
    shares = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    rope = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": factor, **shares}
    return {"vocab_size": 128256, "max_position_embeddings": 131072, "rope_parameters": rope}


def _rope(theta: float) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta}


@dataclass(frozen=True)
class ModelSettings:
    """Settings that benchmarks over a model of random weights share: its shape, where it runs, and how often."""

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
    def has_cpu_goals(self) -> bool:
        """Return whether model, dtype and device are those of the goals on a CPU."""
        return (self.shape, self.dtype, self.device) == ("SmolLM2-135M", "float32", "cpu")

    @property
    def name(self) -> str:
        benchmark = type(self).__module__.rpartition(".")[2]
        parts = (benchmark, self.shape, self.dtype, self.device.partition(":")[0], self.sizes)
        return "-".join(part for part in parts if part)


@dataclass(frozen=True)
class PromptSettings(ModelSettings):
    """Settings of benchmarks that read a prompt: passages x tokens of context, then suffix tokens."""

    passages: int = 10
    tokens: int = 500
    suffix: int = 30

    @property
    def sizes(self) -> str:
        return f"{self.passages}x{self.tokens}"

    @property
    def has_goals_sizes(self) -> bool:
        """Return whether the sizes are those that goals are stated for."""
        return (self.passages, self.tokens, self.suffix) == (10, 500, 30)


VOCABULARY = 16384
SCORE_STD = 2.0
# From the config.json of each model's published directory. "toy" is for tests of the benchmarks themselves.
GRAPH_MEMORY = "RAGCACHE_GRAPH_MEMORY"  # bytes, as the command line's option of that name; 0: no CUDA graphs
SHAPES: dict[str, dict[str, Any]] = {
    "toy": _llama(48, 96, 2, 4, 2, vocab_size=512, max_position_embeddings=4096, rope_parameters=_rope(10000.0)),
    "SmolLM2-135M": _llama(
        *(576, 1536, 30, 9, 3), vocab_size=49152, max_position_embeddings=8192, rope_parameters=_rope(100000.0)
    ),
    "Llama-3.2-1B": _llama(2048, 8192, 16, 32, 8, head_dim=64, **_llama3(32.0)),
    "Llama-3.1-8B": _llama(4096, 14336, 32, 32, 8, head_dim=128, **_llama3(8.0) | {"tie_word_embeddings": False}),
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
    # There is no EOS: random weights would choose it at some point, and a given number of tokens is decoded.
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
    use_graphs(lm, int(given) if given else None)  # as a store does when it is opened
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
    drawn = model.config.initializer_range * model.config.hidden_size**0.5  # standard deviation of an output
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
