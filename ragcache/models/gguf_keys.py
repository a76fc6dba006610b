"""The keys and tensors of a GGUF file that describe a model: each is honoured, or refused by name.

transformers reads some keys of a file and silently drops the others, so that the model it builds computes something
else. `TABLE` has a row for each key that changes the model's computation or where its answers end. A row sets the
configuration or the tokenizer, or refuses. A key of the file's architecture without a row is refused, and so is a
tensor that no parameter of the model takes. A present or absent key means the same as in llama.cpp (llama-model.cpp,
llama-context.cpp, llama-vocab.cpp).
"""

from __future__ import annotations

import math
import re
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from ragcache.errors import UnsupportedModelError
from ragcache.models import gguf_rules
from ragcache.models.gguf_header import Header
from ragcache.models.gguf_rules import RefusalError, Rule, head_dim, ignored, only, only_for, sets
from ragcache.models.gguf_tokenizer import TOKENIZER_TABLE


def _blocks(header: Header, config: PreTrainedConfig, value: int) -> None:
    config.num_hidden_layers = value - header.get("nextn_predict_layers", 0)


def _kv_heads(header: Header, config: PreTrainedConfig, value: Any) -> None:
    if config.model_type != "lfm2":  # transformers reads its layer types from this array
        sets("num_key_value_heads", "num_kv_heads", off=config.num_attention_heads)(header, config, value)


def _key_length(header: Header, config: PreTrainedConfig, value: int) -> None:
    sets("head_dim", off=head_dim(config))(header, config, value)


def _value_length(header: Header, config: PreTrainedConfig, value: int) -> None:
    if value != header.get("attention.key_length", head_dim(config)):
        raise RefusalError("values are not as wide as keys")


def _scale(header: Header, config: PreTrainedConfig, value: float) -> None:
    if hasattr(config, "query_pre_attn_scalar") and value:
        config.query_pre_attn_scalar = value**-2
    elif value and not math.isclose(value, head_dim(config) ** -0.5, rel_tol=1e-5):
        raise RefusalError(f"transformers' {config.model_type} scales scores by the heads' width alone")


def _gating(header: Header, config: PreTrainedConfig, value: int) -> None:
    """Check the gating of experts.

    llama.cpp: 1 is a softmax over all experts, 2 sigmoids, 3 a softmax over the used experts.
    """
    usual = {"gpt_oss": 3, "minimax_m2": 2}.get(config.model_type, 1)
    if value not in (0, usual):
        raise RefusalError(f"transformers' {config.model_type} weighs its experts otherwise")


def _window(header: Header, config: PreTrainedConfig, value: int) -> None:
    slides = getattr(config, "layer_types", None)
    if value == 0 or value >= header.get("context_length", math.inf):
        if slides is None and hasattr(config, "sliding_window"):
            config.sliding_window = None  # it covers the whole context
        elif slides is not None and value:
            config.sliding_window = value
    elif hasattr(config, "sliding_window") and (slides is None or "sliding_attention" in slides):
        config.sliding_window = value
    else:
        raise RefusalError(f"transformers' {config.model_type} has no layers with a sliding window")


def _window_pattern(header: Header, config: PreTrainedConfig, value: Any) -> None:
    """Set the layers' types. An array states which layers slide; a number n: all but each n-th layer slide."""
    layers = range(config.num_hidden_layers)
    slides = value[: len(layers)] if isinstance(value, list) else [value > 1 and n % value < value - 1 for n in layers]
    if not hasattr(config, "layer_types"):
        if any(slides):
            raise RefusalError(f"transformers' {config.model_type} has layers of one type")
        return
    config.layer_types = ["sliding_attention" if is_sliding else "full_attention" for is_sliding in slides]


SCALING = ("type", "factor", "attn_factor", "original_context_length", *gguf_rules.YARN)
TABLE: dict[str, Rule] = {
    "vocab_size": ignored,  # the rows of token_embd.weight decide
    "context_length": sets("max_position_embeddings", "n_positions"),
    "embedding_length": sets("hidden_size"),
    "block_count": _blocks,
    "nextn_predict_layers": only_for("qwen35", "qwen35moe"),
    "feed_forward_length": sets("intermediate_size", "ffn_hidden_size", "n_inner"),
    "use_parallel_residual": sets("use_parallel_residual"),
    "tensor_data_layout": ignored,  # the projections' rows are in llama.cpp's order in any case
    "pooling_type": only(0),
    # Experts.
    "expert_count": sets("num_experts", "num_local_experts", off=0),
    "expert_used_count": sets("num_experts_per_tok", off=0),
    "expert_feed_forward_length": sets("moe_intermediate_size", "intermediate_size"),
    "expert_shared_feed_forward_length": sets("shared_expert_intermediate_size", off=0),
    "expert_group_count": only(0, 1),
    "expert_group_used_count": only(0, 1),
    "expert_weights_norm": sets("norm_topk_prob", off=False),
    "expert_weights_scale": only(0.0, 1.0),
    "expert_gating_func": _gating,
    # Factors and caps.
    "logit_scale": sets("logit_scale", off=1.0),
    "residual_scale": sets("residual_multiplier", off=1.0),
    "embedding_scale": sets("embedding_multiplier", off=1.0),
    "attn_logit_softcapping": sets("attn_logit_softcapping", off=0.0),
    "final_logit_softcapping": sets("final_logit_softcapping", off=0.0),
    # Attention.
    "attention.head_count": sets("num_attention_heads", "n_head"),
    "attention.head_count_kv": _kv_heads,
    "attention.key_length": _key_length,
    "attention.value_length": _value_length,
    "attention.layer_norm_rms_epsilon": sets("rms_norm_eps", "norm_eps", "layer_norm_epsilon"),
    "attention.layer_norm_epsilon": sets("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"),
    "attention.causal": only(True),
    "attention.scale": _scale,
    "attention.clamp_kqv": only(0.0),
    "attention.max_alibi_bias": only(0.0),
    "attention.sliding_window": _window,
    "attention.sliding_window_pattern": _window_pattern,
    "rope.dimension_count": gguf_rules.rope_width,
    "rope.dimension_sections": gguf_rules.rope_sections,
    "rope.freq_base": gguf_rules.rope_base,
    "rope.freq_base_swa": gguf_rules.rope_base_sliding,
    "rope.scale_linear": gguf_rules.rope_scaling,
    **{f"rope.scaling.{key}": gguf_rules.rope_scaling for key in SCALING},
    "rope.scaling.finetuned": ignored,
    # Recurrent layers.
    "full_attention_interval": only_for("qwen35", "qwen35moe"),
    "shortconv.l_cache": only_for("lfm2"),
    **{
        f"ssm.{key}": only_for("qwen35", "qwen35moe", "mamba")
        for key in ("conv_kernel", "inner_size", "state_size", "time_step_rank", "group_count", "dt_b_c_rms")
    },
}
"""Key of an architecture, without the architecture, -> rule. Rules run in this order."""


FILE_TABLE: dict[str, Rule] = {"general.type": only("model"), "split.count": only(0, 1), "adapter.type": only()}
TENSOR_TABLE: dict[str, Rule] = {
    "rope_freqs.weight": gguf_rules.rope_freqs,
    "rope_factors_long.weight": gguf_rules.two_frequencies,
    "rope_factors_short.weight": gguf_rules.two_frequencies,
}


def refuse_arrays(header: Header) -> None:
    """Raise UnsupportedModelError naming a size that differs between layers, which transformers cannot read."""
    taken = {"attention.sliding_window_pattern", "rope.dimension_sections"}
    taken |= {"attention.head_count_kv"} if header.architecture == "lfm2" else set()
    for key in {*TABLE} - taken:
        if isinstance(value := header.get(key), list):
            raise _refuse(header, f"{header.architecture}.{key}", value, "its layers differ")


def amend_config(config: PreTrainedConfig, header: Header) -> None:
    """Add to a configuration that transformers read from a GGUF file everything else that the file states.

    Raises UnsupportedModelError naming the key or tensor that cannot be honoured.
    """
    _amend_unstated(config, header)
    own = f"{header.architecture}."
    known = {own + key for key in TABLE}
    for key in header.keys:
        if key.startswith(own) and key not in known:
            raise _refuse(header, key, header.keys[key], "ragcache does not know what it changes")
    tables = ((own, TABLE), ("tokenizer.", TOKENIZER_TABLE), ("", FILE_TABLE))
    rules = [(prefix + key, rule) for prefix, table in tables for key, rule in table.items()]
    stated = [(key, rule, header.keys[key]) for key, rule in rules if key in header.keys]
    stated += [(name, rule, None) for name, rule in TENSOR_TABLE.items() if name in header.tensors]
    for key, rule, value in stated:
        try:
            rule(header, config, value)
        except RefusalError as reason:
            raise _refuse(header, key, value, reason) from None


def _refuse(header: Header, key: str, value: Any, reason: object) -> UnsupportedModelError:
    shown = "" if value is None else f" = {value!r}" if len(repr(value)) < 60 else " (an array)"
    return UnsupportedModelError(f"{header.path} is not supported: {key}{shown}: {reason}")


def _amend_unstated(config: PreTrainedConfig, header: Header) -> None:
    """Set the values that no key states and that llama.cpp derives from tensors or the architecture."""
    if "token_embd.weight" in header.tensors:
        config.vocab_size = header.tensors["token_embd.weight"].shape[0]
        if (getattr(config, "pad_token_id", None) or 0) >= config.vocab_size:
            config.pad_token_id = None  # the family's own default
    for attribute, tensor in (("attention_bias", "blk.0.attn_q.bias"), ("mlp_bias", "blk.0.ffn_up.bias")):
        if hasattr(config, attribute):
            setattr(config, attribute, tensor in header.tensors)
    if header.architecture in ("gemma2", "gemma3"):
        is_27b = header.get("block_count") == {"gemma2": 46, "gemma3": 62}[header.architecture]
        by_width = header.get("attention.key_length") or head_dim(config)
        by_heads = header.get("embedding_length", 0) // (header.get("attention.head_count") or 1)
        config.query_pre_attn_scalar = by_heads if is_27b else by_width
    elif hasattr(config, "sliding_window") and not getattr(config, "layer_types", None):
        config.sliding_window = None  # until the key says otherwise
    if header.get("rope.freq_base") is None and getattr(config, "rope_parameters", None):
        gguf_rules.rope_base(header, config, gguf_rules.ROPE_BASE)


def refuse_unread_tensors(model: PreTrainedModel, header: Header) -> None:
    """Raise UnsupportedModelError naming a tensor of the file that no parameter of the model takes.

    transformers silently skips such tensors for the architectures of its older reader; its newer reader reports them.
    """
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

    if header.architecture.startswith("qwen35"):
        return
    processor = TENSOR_PROCESSORS.get(header.architecture, TensorProcessor)(config=model.config.to_dict())
    read = get_gguf_hf_weights_map(model, processor)
    for name in header.tensors:
        if name not in read and name not in TENSOR_TABLE and not re.search(r"_exps\.weight$|^output\.weight$", name):
            raise _refuse(header, name, None, f"transformers' {model.config.model_type} has no place for this tensor")
