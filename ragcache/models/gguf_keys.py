"""The keys and tensors of a GGUF file that describe a model: each is honoured, or refused by name.

transformers reads some keys of a file and silently drops the others, so that the model it builds computes something
else. `TABLE` has a row for each key that changes the model's computation or where its answers end. A row sets the
configuration or the tokenizer, or refuses. A key of the file's architecture without a row is refused, and so is a
tensor that no parameter of the model takes. A present or absent key means the same as in llama.cpp (llama-model.cpp,
llama-context.cpp, llama-vocab.cpp).
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Regex, pre_tokenizers
from transformers import PreTrainedConfig, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from ragcache.errors import UnsupportedModelError

MAGIC = b"GGUF"
SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
STRING, ARRAY, FLOAT32 = 8, 9, 0
ROPE_BASE = 10_000.0  # llama.cpp's, for a file that states none


class TensorPlace(NamedTuple):
    """A tensor in the file.

    shape: outermost dimension first
    start: offset in the file
    """

    shape: tuple[int, ...]
    kind: int
    start: int


@dataclass(frozen=True)
class Header:
    """A GGUF file's metadata and the places of its tensors. An array of strings is reduced to its length."""

    path: Path
    keys: dict[str, Any]
    tensors: dict[str, TensorPlace]

    @property
    def architecture(self) -> str:
        return str(self.keys["general.architecture"])

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of an architecture's key, named without the architecture."""
        return self.keys.get(f"{self.architecture}.{key}", default)

    def floats(self, tensor: str) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Return a float32 tensor's values. Raises UnsupportedModelError for another type."""
        place = self.tensors[tensor]
        if place.kind != FLOAT32:
            raise UnsupportedModelError(f"{self.path} is not supported: {tensor} is not in float32")
        return np.fromfile(self.path, np.float32, math.prod(place.shape), offset=place.start)

    @property
    def num_values(self) -> int:
        return sum(math.prod(place.shape) for place in self.tensors.values())


def read_header(path: Path) -> Header:
    """Read a GGUF file's metadata. Raises ValueError for a file that is not GGUF or is cut short, OSError."""
    with path.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise ValueError(f"{path} does not start with GGUF's magic bytes")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                return _Reader(data).header(path)
            except (struct.error, KeyError, UnicodeDecodeError) as error:
                raise ValueError(f"{path} is cut short or damaged in its metadata") from error


class _Reader:
    """A reader of values from a file's bytes, from the start on."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = len(MAGIC)

    def header(self, path: Path) -> Header:
        version, num_tensors, num_keys = self._numbers("<IQQ")
        if version not in (2, 3):
            raise ValueError(f"{path} is GGUF v{version}, not v2 or v3")
        keys = {}
        for _ in range(num_keys):
            name = self._string()
            keys[name] = self._value(*self._numbers("<I"))
        infos = [self._tensor() for _ in range(num_tensors)]
        alignment = keys.get("general.alignment", 32)
        base = -(-self._at // alignment) * alignment
        return Header(path, keys, {name: place._replace(start=base + place.start) for name, place in infos})

    def _numbers(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from(layout, self._data, self._at)
        self._at += struct.calcsize(layout)
        return values

    def _string(self) -> str:
        (length,) = self._numbers("<Q")
        end = self._at + length
        if end > len(self._data):
            raise struct.error("a string goes beyond the end")
        text = self._data[self._at : end].decode("utf-8")
        self._at = end
        return text

    def _value(self, kind: int) -> Any:
        if kind in SCALARS:
            return self._numbers(SCALARS[kind])[0]
        if kind == STRING:
            return self._string()
        if kind != ARRAY:
            raise struct.error(f"type {kind}")
        kind, count = self._numbers("<IQ")
        if kind in SCALARS:
            return list(self._numbers(f"<{count}{SCALARS[kind][1]}"))
        if kind != STRING:
            raise struct.error(f"an array of type {kind}")
        for _ in range(count):
            (length,) = self._numbers("<Q")
            self._at += length
        return count

    def _tensor(self) -> tuple[str, TensorPlace]:
        name = self._string()
        (rank,) = self._numbers("<I")
        shape = self._numbers(f"<{rank}Q")
        kind, start = self._numbers("<IQ")
        return name, TensorPlace(tuple(reversed(shape)), kind, start)


# Rules. Each takes the file, its configuration and the key's value, and raises _RefusalError.


class _RefusalError(Exception):
    """The reason why a key cannot be honoured."""


Rule = Callable[[Header, PreTrainedConfig, Any], None]


def _ignored(header: Header, config: PreTrainedConfig, value: Any) -> None:
    """Accept any value: it changes neither the model's computation nor the end of answers, or another rule reads it."""


def _only(*values: Any) -> Rule:
    def rule(header: Header, config: PreTrainedConfig, value: Any) -> None:
        if value not in values:
            raise _RefusalError("no model that ragcache reads from GGUF computes this")

    return rule


def _sets(*attributes: str, off: Any = None) -> Rule:
    """Return a rule that sets the first of these attributes that the configuration has.

    off: the value that needs no such attribute
    """

    def rule(header: Header, config: PreTrainedConfig, value: Any) -> None:
        attribute = next((name for name in attributes if hasattr(config, name)), None)
        if attribute is not None:
            setattr(config, attribute, value)
        elif value != off:
            raise _RefusalError(f"transformers' {config.model_type} has no such setting")

    return rule


def _for(*architectures: str) -> Rule:
    """Return a rule that accepts a key only for these architectures, for which transformers reads it."""

    def rule(header: Header, config: PreTrainedConfig, value: Any) -> None:
        if header.architecture not in architectures:
            raise _RefusalError(f"{header.architecture} is not read with it")

    return rule


def _blocks(header: Header, config: PreTrainedConfig, value: int) -> None:
    config.num_hidden_layers = value - header.get("nextn_predict_layers", 0)


def _kv_heads(header: Header, config: PreTrainedConfig, value: Any) -> None:
    if config.model_type != "lfm2":  # transformers reads its layer types from this array
        _sets("num_key_value_heads", "num_kv_heads", off=config.num_attention_heads)(header, config, value)


def _head_dim(config: PreTrainedConfig) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _key_length(header: Header, config: PreTrainedConfig, value: int) -> None:
    _sets("head_dim", off=_head_dim(config))(header, config, value)


def _value_length(header: Header, config: PreTrainedConfig, value: int) -> None:
    if value != header.get("attention.key_length", _head_dim(config)):
        raise _RefusalError("values are not as wide as keys")


def _scale(header: Header, config: PreTrainedConfig, value: float) -> None:
    if hasattr(config, "query_pre_attn_scalar") and value:
        config.query_pre_attn_scalar = value**-2
    elif value and not math.isclose(value, _head_dim(config) ** -0.5, rel_tol=1e-5):
        raise _RefusalError(f"transformers' {config.model_type} scales scores by the heads' width alone")


def _gating(header: Header, config: PreTrainedConfig, value: int) -> None:
    """Check the gating of experts.

    llama.cpp: 1 is a softmax over all experts, 2 sigmoids, 3 a softmax over the used experts.
    """
    usual = {"gpt_oss": 3, "minimax_m2": 2}.get(config.model_type, 1)
    if value not in (0, usual):
        raise _RefusalError(f"transformers' {config.model_type} weighs its experts otherwise")


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
        raise _RefusalError(f"transformers' {config.model_type} has no layers with a sliding window")


def _window_pattern(header: Header, config: PreTrainedConfig, value: Any) -> None:
    """Set the layers' types. An array states which layers slide; a number n: all but each n-th layer slide."""
    layers = range(config.num_hidden_layers)
    slides = value[: len(layers)] if isinstance(value, list) else [value > 1 and n % value < value - 1 for n in layers]
    if not hasattr(config, "layer_types"):
        if any(slides):
            raise _RefusalError(f"transformers' {config.model_type} has layers of one type")
        return
    config.layer_types = ["sliding_attention" if one else "full_attention" for one in slides]


# Positions.


def _rope(config: PreTrainedConfig, kind: str = "full_attention") -> dict[str, Any]:
    """Return the configuration's RoPE parameters, those for `kind` if layer types have different ones."""
    rope = config.rope_parameters
    return rope.get(kind, rope)  # type: ignore[no-any-return]


def _rope_width(header: Header, config: PreTrainedConfig, value: int) -> None:
    width = header.get("attention.key_length", _head_dim(config))
    if hasattr(config, "rotary_dim"):
        config.rotary_dim = value
    elif "partial_rotary_factor" in _rope(config):
        _rope(config)["partial_rotary_factor"] = value / width
    elif value != width:
        raise _RefusalError(f"transformers' {config.model_type} rotates whole heads, of {width}")


def _rope_sections(header: Header, config: PreTrainedConfig, value: list[int]) -> None:
    if [one for one in value if one] != list(_rope(config).get("mrope_section", [])):
        raise _RefusalError(f"transformers' {config.model_type} has no such sections")


def _rope_base(header: Header, config: PreTrainedConfig, value: float) -> None:
    _rope(config)["rope_theta"] = value


def _rope_base_sliding(header: Header, config: PreTrainedConfig, value: float) -> None:
    if "sliding_attention" in config.rope_parameters:
        config.rope_parameters["sliding_attention"]["rope_theta"] = value
    elif value != header.get("rope.freq_base", ROPE_BASE):
        raise _RefusalError(f"transformers' {config.model_type} has one base for all layers")


YARN = {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow"}


def _rope_scaling(header: Header, config: PreTrainedConfig, _value: Any) -> None:
    """Read all keys about the scaling of positions together. A factor without a type is linear, as in llama.cpp."""
    kind = header.get("rope.scaling.type", "linear")
    factor = header.get("rope.scaling.factor") or header.get("rope.scale_linear") or 1.0
    attention = header.get("rope.scaling.attn_factor", 1.0)
    rope = _rope(config)
    if kind == "yarn" and factor > 1:
        # llama.cpp's `attn_factor` comes on top of YaRN's own factor.
        rope |= {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": header.get(
                "rope.scaling.original_context_length", header.get("context_length")
            ),
            "attention_factor": attention * (0.1 * math.log(factor) + 1.0),
        }
        rope |= {
            name: header.get(f"rope.scaling.{key}") for key, name in YARN.items() if header.get(f"rope.scaling.{key}")
        }
    elif kind not in ("none", "linear", "yarn"):
        raise _RefusalError("positions' frequencies change with the length of the text")
    elif attention != 1.0:
        raise _RefusalError(f"rope.scaling.attn_factor {attention} is read with yarn alone")
    elif kind == "linear" and factor != 1.0:
        rope |= {"rope_type": "linear", "factor": factor}


def _rope_freqs(header: Header, config: PreTrainedConfig, _value: Any) -> None:
    """Find the parameters of Llama 3.1's scaling that yield these divisors of the frequencies."""
    rope = _rope(config)
    divisors = header.floats("rope_freqs.weight").astype(np.float64)
    if np.allclose(divisors, 1.0, rtol=1e-6):
        return
    if rope.get("rope_type", "default") != "default":
        raise _RefusalError("it comes on top of another scaling")
    factor = float(divisors.max())
    wavelengths = 2 * math.pi * rope["rope_theta"] ** (np.arange(len(divisors)) / len(divisors))
    for original in (8192, *(1 << power for power in range(9, 21))):
        smooth = np.clip((original / wavelengths - 1.0) / 3.0, 0.0, 1.0)  # low and high frequency factor: 1 and 4
        if np.allclose(1 / ((1 - smooth) / factor + smooth), divisors, rtol=1e-4):
            rope |= {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": original,
            }
            return
    raise _RefusalError("its frequencies are not those of Llama 3.1's scaling")


def _two_frequencies(header: Header, config: PreTrainedConfig, _value: Any) -> None:
    raise _RefusalError("positions' frequencies change with the length of the text")


# The tokenizer. Keys that transformers reads itself have the rule `_ignored`.


def _tokens(header: Header, config: PreTrainedConfig, value: int) -> None:
    embedding = header.tensors.get("token_embd.weight")
    if embedding is not None and value != embedding.shape[0]:
        raise _RefusalError(f"token_embd.weight has {embedding.shape[0]} rows")


def _pre_tokenizer(header: Header, config: PreTrainedConfig, value: str) -> None:
    if header.keys.get("tokenizer.ggml.model") == "gpt2" and value not in {*SPLITS, *_splits_of_transformers()}:
        raise _RefusalError("text would be split otherwise than the model was trained")


def _begins(header: Header, config: PreTrainedConfig, value: bool) -> None:
    if value and "tokenizer.ggml.bos_token_id" not in header.keys:
        raise _RefusalError("the file names no such token")


SCALING = ("type", "factor", "attn_factor", "original_context_length", *YARN)
TABLE: dict[str, Rule] = {
    "vocab_size": _ignored,  # the rows of token_embd.weight decide
    "context_length": _sets("max_position_embeddings", "n_positions"),
    "embedding_length": _sets("hidden_size"),
    "block_count": _blocks,
    "nextn_predict_layers": _for("qwen35", "qwen35moe"),
    "feed_forward_length": _sets("intermediate_size", "ffn_hidden_size", "n_inner"),
    "use_parallel_residual": _sets("use_parallel_residual"),
    "tensor_data_layout": _ignored,  # the projections' rows are in llama.cpp's order in any case
    "pooling_type": _only(0),
    # Experts.
    "expert_count": _sets("num_experts", "num_local_experts", off=0),
    "expert_used_count": _sets("num_experts_per_tok", off=0),
    "expert_feed_forward_length": _sets("moe_intermediate_size", "intermediate_size"),
    "expert_shared_feed_forward_length": _sets("shared_expert_intermediate_size", off=0),
    "expert_group_count": _only(0, 1),
    "expert_group_used_count": _only(0, 1),
    "expert_weights_norm": _sets("norm_topk_prob", off=False),
    "expert_weights_scale": _only(0.0, 1.0),
    "expert_gating_func": _gating,
    # Factors and caps.
    "logit_scale": _sets("logit_scale", off=1.0),
    "residual_scale": _sets("residual_multiplier", off=1.0),
    "embedding_scale": _sets("embedding_multiplier", off=1.0),
    "attn_logit_softcapping": _sets("attn_logit_softcapping", off=0.0),
    "final_logit_softcapping": _sets("final_logit_softcapping", off=0.0),
    # Attention.
    "attention.head_count": _sets("num_attention_heads", "n_head"),
    "attention.head_count_kv": _kv_heads,
    "attention.key_length": _key_length,
    "attention.value_length": _value_length,
    "attention.layer_norm_rms_epsilon": _sets("rms_norm_eps", "norm_eps", "layer_norm_epsilon"),
    "attention.layer_norm_epsilon": _sets("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"),
    "attention.causal": _only(True),
    "attention.scale": _scale,
    "attention.clamp_kqv": _only(0.0),
    "attention.max_alibi_bias": _only(0.0),
    "attention.sliding_window": _window,
    "attention.sliding_window_pattern": _window_pattern,
    # Positions.
    "rope.dimension_count": _rope_width,
    "rope.dimension_sections": _rope_sections,
    "rope.freq_base": _rope_base,
    "rope.freq_base_swa": _rope_base_sliding,
    "rope.scale_linear": _rope_scaling,
    **{f"rope.scaling.{key}": _rope_scaling for key in SCALING},
    "rope.scaling.finetuned": _ignored,
    # Recurrent layers.
    "full_attention_interval": _for("qwen35", "qwen35moe"),
    "shortconv.l_cache": _for("lfm2"),
    **{
        f"ssm.{key}": _for("qwen35", "qwen35moe", "mamba")
        for key in ("conv_kernel", "inner_size", "state_size", "time_step_rank", "group_count", "dt_b_c_rms")
    },
}
"""Key of an architecture, without the architecture, -> rule. Rules run in this order."""

TOKENIZER_TABLE: dict[str, Rule] = {
    "ggml.model": _only("gpt2", "llama", "gemma4", "t5", "none", "no_vocab"),
    "ggml.pre": _pre_tokenizer,
    "ggml.tokens": _tokens,
    "ggml.add_bos_token": _begins,
    "ggml.add_eos_token": _only(False),
    "ggml.add_sep_token": _only(False),
    "ggml.suppress_tokens": _only([]),
    "ggml.normalizer.lowercase": _only(False),
    "ggml.normalizer.strip_accents": _only(False),
    "rwkv.world": _only(),
}
"""Key of the tokenizer -> rule. Others are harmless, or read by transformers or by `amend_tokenizer`."""

FILE_TABLE: dict[str, Rule] = {"general.type": _only("model"), "split.count": _only(0, 1), "adapter.type": _only()}
TENSOR_TABLE: dict[str, Rule] = {
    "rope_freqs.weight": _rope_freqs,
    "rope_factors_long.weight": _two_frequencies,
    "rope_factors_short.weight": _two_frequencies,
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
        except _RefusalError as reason:
            raise _refuse(header, key, value, reason) from None


def _refuse(header: Header, key: str, value: Any, reason: object) -> UnsupportedModelError:
    said = "" if value is None else f" = {value!r}" if len(repr(value)) < 60 else " (an array)"
    return UnsupportedModelError(f"{header.path} is not supported: {key}{said}: {reason}")


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
        by_width = header.get("attention.key_length") or _head_dim(config)
        by_heads = header.get("embedding_length", 0) // (header.get("attention.head_count") or 1)
        config.query_pre_attn_scalar = by_heads if is_27b else by_width
    elif hasattr(config, "sliding_window") and not getattr(config, "layer_types", None):
        config.sliding_window = None  # until the key says otherwise
    if header.get("rope.freq_base") is None and getattr(config, "rope_parameters", None):
        _rope_base(header, config, ROPE_BASE)


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


# The ends of answers, and the splitting of text.


def end_ids(header: Header) -> list[int]:
    """Return the ids that end an answer: those of the end of text, of a turn, and of a message to a tool."""
    ids = (header.keys.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    return list(dict.fromkeys(int(one) for one in ids if one is not None))


WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"  # GPT-2's
SPLITS: dict[str, tuple[str, ...]] = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", WORDS, r"\p{N}+", "[0-9][0-9][0-9]"),
    "falcon": (r"[\p{P}\$\+<=>\^~\|`]+", WORDS, "[0-9][0-9][0-9]"),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}"),
    **dict.fromkeys(
        ("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b"), (r"\p{N}", WORDS)
    ),
    **dict.fromkeys(
        ("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling", "gigachat", "a.x-4.0", "mellum"), ()
    ),
}
"""Name of a pre-tokenizer -> llama.cpp's patterns, applied in order. Empty: GPT-2's words, as in transformers."""


WHOLE_WORDS = ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "tekken")
"""Pre-tokenizers whose pieces become tokens directly if the vocabulary has them, whatever the merges say."""


def _splits_of_transformers() -> frozenset[str]:
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    return frozenset(GGUF_PRE_TOKENIZER_SPLITS)


def amend_tokenizer(tokenizer: Tokenizer, header: Header) -> None:
    """Make a tokenizer that transformers read from a GGUF file split and begin text as the file states."""
    keys, backend = header.keys, tokenizer.backend_tokenizer
    if keys["tokenizer.ggml.model"] == "gpt2":
        pre = keys.get("tokenizer.ggml.pre", "default")
        if patterns := SPLITS.get(pre):
            splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
            bytes_alone = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
            backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, bytes_alone])
        backend.model.ignore_merges = pre in WHOLE_WORDS
    elif keys.get("tokenizer.ggml.add_space_prefix") is False and isinstance(
        backend.pre_tokenizer, pre_tokenizers.Metaspace
    ):
        backend.pre_tokenizer.prepend_scheme = "never"
    # A template places the token itself; raw text begins with it if the tokenizer has one.
    if keys.get("tokenizer.ggml.add_bos_token") is False and "bos_token" not in (tokenizer.chat_template or ""):
        tokenizer.bos_token = None
