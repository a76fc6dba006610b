"""Tiny random models of every family that law 1 is proved on, and the oracle they are checked against."""

import atexit
import inspect
import shutil
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import ragcache as rc
from ragcache.models.language_model import LanguageModel
from ragcache.models.trained_tokens import TrainedTokens

VOCAB = 199
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": 10000.0, **more}


YARN = _rope("yarn", factor=4.0, original_max_position_embeddings=128)
LLAMA3 = _rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-linear": ("llama", {"rope_parameters": _rope("linear", factor=3.0)}),
    "llama-llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama-yarn": ("llama", {"rope_parameters": YARN}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-window": ("mistral", {"sliding_window": 11}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "phi3": ("phi3", {"rope_parameters": _rope("default")}),
    "phi3-partial": ("phi3", {"rope_parameters": _rope("default", partial_rotary_factor=0.5), "head_dim": 16}),
    "olmo2": ("olmo2", {}),
    "granite": (
        "granite",
        {"embedding_multiplier": 3.0, "residual_multiplier": 0.7, "attention_multiplier": 0.2, "logits_scaling": 2.0},
    ),
    "glm4": ("glm4", {"head_dim": 12, "rope_parameters": _rope("default", partial_rotary_factor=0.5)}),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0, 1], "no_rope_layer_interval": 2}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": (
        "qwen3_moe",
        {
            "head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "mlp_only_layers": [],
        },
    ),
    "gemma2": (
        "gemma2",
        {"head_dim": 16, "sliding_window": 9, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 5.0},
    ),
    "gemma3": ("gemma3_text", {"head_dim": 16, "sliding_window": 9, "query_pre_attn_scalar": 16}),
    "cohere": ("cohere", {}),
    "cohere2": ("cohere2", {"sliding_window": 9, "head_dim": 12}),
    "olmo3": ("olmo3", {"sliding_window": 9}),
    "exaone4": ("exaone4", {"sliding_window": 9}),
    "gpt_neox": ("gpt_neox", {"num_key_value_heads": None}),
    "phi": ("phi", {"num_key_value_heads": None}),
    "stablelm": ("stablelm", {"rope_parameters": _rope("default", partial_rotary_factor=0.5)}),
    "starcoder2": ("starcoder2", {}),
    "olmoe": ("olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    "gpt_oss": (
        "gpt_oss",
        {
            "head_dim": 16,
            "sliding_window": 9,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": _rope("default"),
        },
    ),
    # The last two have layers that differ, in heads and widths.
    "gemma4": (
        "gemma4_text",
        {
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            "head_dim": 16,
            "global_head_dim": 24,
            "num_key_value_heads": 4,
            "num_global_key_value_heads": 2,
            "attention_k_eq_v": True,
            "sliding_window": 9,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCAB,
        },
    ),
    "mimo_v2_flash": (
        "mimo_v2_flash",
        {
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "num_key_value_heads": 1,
            "head_dim": 12,
            "v_head_dim": 8,
            "sliding_window": 9,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
        },
    ),
}


LATENT = {  # heads' keys and values are made of one latent
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 12,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
}
FAMILIES |= {
    "deepseek_v2": ("deepseek_v2", {**LATENT, "topk_method": "greedy"}),
    "deepseek_v3": ("deepseek_v3", {**LATENT, "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7}}),
    "llama4": (
        "llama4_text",
        {
            "head_dim": 12,
            "intermediate_size_mlp": 64,
            "no_rope_layers": [1, 0, 1],
            "num_local_experts": 4,
            "attention_chunk_size": 128,
            "rope_parameters": _rope("default"),
        },
    ),
    "granite_swa": (
        "granite_swa",
        {
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "layer_rope_theta": [10000.0, 500.0, 0.0],
            "sliding_window": 9,
        },
    ),
    "ministral3": (
        "ministral3",
        {"head_dim": 12, "sliding_window": None, "rope_parameters": {**YARN, "llama_4_scaling_beta": 0.1}},
    ),
    "phi3-long": (
        "phi3",
        {
            "original_max_position_embeddings": 128,
            "rope_parameters": _rope(
                "longrope",
                short_factor=[1.0, 1.1, 1.2, 1.4, 1.8, 2.0],
                long_factor=[3.0] * 6,
                original_max_position_embeddings=128,
            ),
        },
    ),
}


def tiny_config(family: str) -> PreTrainedConfig:
    kind, extra = FAMILIES[family]
    return CONFIG_MAPPING[kind](**{**SMALL, **extra})


def own_directory(name: str) -> str:
    """A new directory that is there as long as the process is."""
    directory = tempfile.mkdtemp(prefix=f"ragcache-{name}-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return directory


@cache
def saved_tiny(family: str, spec: TrainedTokens | None = None) -> str:
    """A Hugging Face directory with random weights of `family`, trained as `spec` says; made once a process, and not to
    be changed."""
    directory = own_directory(family)
    torch.manual_seed(0)
    config = tiny_config(family)
    if spec is not None:
        config.ragcache = spec.section()
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return directory


def save_tiny(family: str, directory: str) -> str:
    """A copy of it for a test that changes the directory, or loads it in a way of its own."""
    shutil.copytree(saved_tiny(family), directory, dirs_exist_ok=True)
    return directory


def oracle_model(directory: str) -> PreTrainedModel:
    """Plain transformers, eager attention: nothing of ragcache in it."""
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()


def load_tiny(family: str, directory: Path) -> tuple[LanguageModel, PreTrainedModel]:
    """Random weights of `family`, saved in `directory`, as ragcache and as the oracle load them."""
    saved = save_tiny(family, str(directory))
    return rc.load_lm(saved), oracle_model(saved)


@cache
def tiny(family: str, spec: TrainedTokens | None = None) -> tuple[LanguageModel, PreTrainedModel]:
    """The same, loaded once a process: for tests that leave both models as they are."""
    saved = saved_tiny(family, spec)
    return rc.load_lm(saved), oracle_model(saved)


def ids_of(count: int, seed: int = 0) -> list[int]:
    return torch.randint(3, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def causal(count: int) -> Tensor:
    """bool [count, count]: each token sees itself and all before it."""
    return torch.ones(count, count, dtype=torch.bool).tril()


def random_prompt(
    seed: int = 0, prefix: int = 5, chunks: tuple[int, ...] = (7, 13, 4, 9), suffix: int = 6
) -> rc.Prompt:
    generator = torch.Generator().manual_seed(seed)

    def ids(count: int) -> list[int]:
        return torch.randint(3, VOCAB, (count,), generator=generator).tolist()

    return rc.Prompt(prefix_ids=ids(prefix), chunk_ids=[ids(count) for count in chunks], suffix_ids=ids(suffix))


def block_diagonal(prompt: rc.Prompt) -> Tensor:
    """bool [n, n]: causal; a chunk's tokens see their own chunk only, the suffix sees everything."""
    parts = [len(prompt.prefix_ids), *(len(c) for c in prompt.chunk_ids), len(prompt.suffix_ids)]
    owner = torch.repeat_interleave(torch.arange(len(parts)), torch.tensor(parts))
    same = owner[:, None] == owner[None, :]
    from_suffix = (owner == len(parts) - 1)[:, None]
    return (same | from_suffix) & torch.ones(len(owner), len(owner), dtype=torch.bool).tril()


def figure_2(parts: Sequence[tuple[str, Sequence[int]]]) -> tuple[list[int], Tensor]:
    """The mask of KVLink's figure 2: the ids and bool [n, n], built token by token.

    parts: (kind, ids) in order; a "chunk" sees itself alone, anything else all that comes before it
    """
    ids: list[int] = []
    kinds: list[tuple[str, int]] = []
    for number, (kind, tokens) in enumerate(parts):
        ids += tokens
        kinds += [(kind, number)] * len(tokens)
    sees = [
        [column <= row and (kind[0] != "chunk" or kind == kinds[column]) for column in range(len(ids))]
        for row, kind in enumerate(kinds)
    ]
    return ids, torch.tensor(sees)


def linked(
    prompt: rc.Prompt, links: Sequence[Sequence[int]], before: Sequence[int] = (), behind: Sequence[int] = ()
) -> tuple[list[int], Tensor]:
    """Ids and mask of a prompt with link tokens behind each passage."""
    parts = [("prefix", [*prompt.prefix_ids, *before])]
    for chunk, link in zip(prompt.chunk_ids, links, strict=True):
        parts += [("chunk", list(chunk)), ("link", list(link))]
    return figure_2([*parts, ("suffix", [*behind, *prompt.suffix_ids])])


def layout(prompt: rc.Prompt, answer: Sequence[int] = ()) -> tuple[Tensor, Tensor, Tensor]:
    """Positions of parallel encoding, what sees what, and which keys are chunks', with answer tokens at the end."""
    start, longest = len(prompt.prefix_ids), max(len(chunk) for chunk in prompt.chunk_ids)
    positions = [*range(start)]
    for chunk in prompt.chunk_ids:
        positions += range(start, start + len(chunk))
    behind = len(prompt.suffix_ids) + len(answer)
    positions += range(start + longest, start + longest + behind)
    n = len(positions)
    allowed = torch.ones(n, n, dtype=torch.bool).tril()
    allowed[: prompt.num_tokens, : prompt.num_tokens] = block_diagonal(prompt)
    allowed[:, :start] = torch.ones(n, n, dtype=torch.bool).tril()[:, :start]
    index = torch.arange(n)
    of_chunks = (index >= start) & (index < prompt.context_tokens)
    return torch.tensor(positions), allowed, of_chunks


def masks_of(model: PreTrainedModel, allowed: Tensor, positions: Sequence[int] | None = None) -> Any:
    """`allowed` (bool [n, n]) as the additive mask, or the masks by layer type, that the family's forward takes.

    positions: of the tokens, for sliding windows; 0, 1, ... when absent
    """
    index = torch.arange(allowed.shape[0]) if positions is None else torch.tensor(positions)
    window = getattr(model.config, "sliding_window", None)
    near = index[:, None] - index[None, :] < (window or len(index) + 1)

    def additive(mask: Tensor) -> Tensor:
        return torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)[None, None]

    kinds = getattr(model.config, "layer_types", None)
    if model.config.model_type == "llama4_text":  # no prompt here is longer than a chunk
        return dict.fromkeys(("full_attention", "chunked_attention"), additive(allowed))
    if kinds and model.config.model_type in TYPED_MASKS:
        return {"full_attention": additive(allowed), "sliding_attention": additive(allowed & near)}
    return additive(allowed & near if window and not kinds else allowed)


def oracle_logits(model: PreTrainedModel, prompt: rc.Prompt, allowed: Tensor) -> Tensor:
    """One plain forward of the same ids under an explicit mask; last token's logits."""
    return oracle_logits_of(model, prompt.ids, allowed)


def causal_logits(model: PreTrainedModel, ids: Sequence[int]) -> Tensor:
    """One plain forward of full prefill; last token's logits."""
    return oracle_logits_of(model, ids, causal(len(ids)))


def oracle_logits_of(
    model: PreTrainedModel, ids: Sequence[int], allowed: Tensor, positions: Sequence[int] | None = None
) -> Tensor:
    """The same for any ids, at any positions (0, 1, ... when absent)."""
    at = torch.tensor([list(positions or range(len(ids)))])
    mask = masks_of(model, allowed, positions)
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids]), position_ids=at, attention_mask=mask).logits[0, -1]


def logits_under(
    model: PreTrainedModel, ids: list[int], allowed: Tensor | None = None, positions: Tensor | None = None
) -> Tensor:
    """One plain forward of any family's model, under a mask (bool [n, n]) and at positions where they are given; last
    token's logits."""
    mask: Any = None
    if allowed is not None:
        hidden = torch.finfo(model.dtype).min
        mask = torch.zeros(allowed.shape, dtype=model.dtype).masked_fill(~allowed, hidden)[None, None]
        kinds = set(getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ())
        if kinds and "isinstance(causal_mask_mapping" in inspect.getsource(sys.modules[type(model).__module__]):
            mask = dict.fromkeys(kinds, mask)  # no window is as short as the prompt
    with torch.no_grad():
        at = (torch.arange(len(ids)) if positions is None else positions)[None]
        return model(input_ids=torch.tensor([ids]), position_ids=at, attention_mask=mask).logits[0, -1].float()


def assert_same(ours: Tensor, theirs: Tensor, atol: float = 2e-5) -> None:
    """Equal to float32 rounding, relative to the largest of the expected values."""
    scale = theirs.abs().max()
    torch.testing.assert_close(ours / scale, theirs / scale, atol=atol, rtol=0)


# For tests of one method: the traits that a method could meet, once each.
METHOD_FAMILIES = [
    "llama", "qwen3", "phi3", "mixtral", "mistral-window", "gemma2", "gemma3", "glm4", "smollm3", "gpt_oss", "gemma4",
]  # fmt: skip
# For methods that work as another one does: no position in a layer, sinks, capped scores, keys that are values.
FEW_FAMILIES = ["gemma2", "smollm3", "gpt_oss", "gemma4"]
TYPED_MASKS = {
    "cohere2", "exaone4", "gemma2", "gemma3_text", "gemma4_text", "gpt_oss", "granite_swa", "mimo_v2_flash", "olmo3",
    "qwen2", "qwen3", "smollm3",
}  # fmt: skip


def method_families(*more: str, without: str = "") -> list[Any]:
    """All families but one, of which a commit is tried on METHOD_FAMILIES, and on `more`."""
    kept = {*METHOD_FAMILIES, *more}
    named = sorted(FAMILIES.keys() - {without})
    return [name if name in kept else pytest.param(name, marks=pytest.mark.slow) for name in named]
