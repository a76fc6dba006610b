"""Which models can be moved exactly, and why the others cannot.

A model is taken by what it does, not by its name: the configuration is read for the known obstacles, then a few
tokens are run to see that every layer calls transformers' attention interface, which layers rotate, and that what
every recipe records gives the model's own keys and values. A new family that follows transformers' conventions needs
no code here.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedConfig, PreTrainedModel

from ragcache.errors import UnsupportedModelError
from ragcache.kv.block import KVBlock
from ragcache.kv.cache import CacheShape
from ragcache.kv.rope import Apply, Rope, takes_layer_type
from ragcache.models.attention import EncodePass, hook_rotary
from ragcache.models.encoding import encode_batch, run_decoder
from ragcache.models.layerwise import decoder_layers, hook_layers

MOVING_ROPE = {
    "dynamic": "dynamic NTK scaling changes the rotary frequencies with the length of the prompt",
    "longrope": "LongRoPE changes the rotary frequencies with the length of the prompt",
}
ATTENTION_LAYERS = {"full_attention", "sliding_attention"}
_PROBE_TOKENS = 5


def refuse_by_config(config: PreTrainedConfig, name: str) -> None:
    """Raises UnsupportedModelError for obstacles that the configuration states, before any weights are read."""
    reason = _config_reason(config)
    if reason is not None:
        raise UnsupportedModelError(f"{name} ({config.model_type}) is not supported: {reason}")


def _config_reason(config: PreTrainedConfig) -> str | None:
    if getattr(config, "is_encoder_decoder", False):
        return "it is an encoder-decoder model; ragcache needs a causal language model"
    config = config.get_text_config(decoder=True)
    others = {str(kind) for kind in getattr(config, "layer_types", None) or ()} - ATTENTION_LAYERS
    if others:
        return f"layers of type {', '.join(sorted(others))} keep a state or a pattern that cannot be moved"
    if getattr(config, "kv_lora_rank", None):
        return "multi-head latent attention keeps a joint latent, not keys and values by head"
    if getattr(config, "alibi", False) or getattr(config, "position_embedding_type", None) == "alibi":
        return "ALiBi adds a bias by distance to the scores; there is no rotation to move"
    for kind in _rope_types(config):
        if kind in MOVING_ROPE:
            return MOVING_ROPE[kind]
    return None


def _rope_types(config: PreTrainedConfig) -> list[str]:
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [p for p in parameters.values() if isinstance(p, dict)] or [parameters]
    return [str(p.get("rope_type", "default")) for p in nested]


@dataclass(frozen=True)
class Inspected:
    """Findings of the probes about a model."""

    rope: Rope
    shape: CacheShape


class _Probe(Cache):  # type: ignore[misc]
    """Keeps what each layer hands to its cache."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.seen: dict[int, tuple[Tensor, Tensor]] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        self.seen[layer_idx] = (key_states.clone(), value_states.clone())
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0


@torch.inference_mode()
def inspect(model: PreTrainedModel, name: str) -> Inspected:
    """Run a few tokens and learn the model's rotation. Raises UnsupportedModelError naming what stands in the way."""
    rotary = _rotary_module(model, name)
    true_keys, modules, windows = _run_probe(model, name)
    layers = sorted(true_keys)
    num_layers = int(text_config(model).num_hidden_layers)
    if layers != list(range(num_layers)):
        raise _unsupported(model, name, f"only {len(layers)} of {num_layers} layers keep keys and values")
    _check_windows(model, name, windows)
    apply = _rotation_function(model, name, modules[0])
    rotated = [_rotates(model, name, modules[layer], rotary, layer) for layer in layers]
    if not any(rotated):
        raise _unsupported(model, name, "no layer rotates its keys: its positions are not rotary")
    hook_rotary(rotary)
    hook_layers(decoder_layers(model, modules))
    shape = _shape(model, name, true_keys)
    rope = Rope(rotary, apply, _layer_types(model), rotated, shape.key_dim)
    _verify(model, name, rope, shape, true_keys)
    return Inspected(rope, shape)


def text_config(model: PreTrainedModel) -> PreTrainedConfig:
    """The part of the configuration that describes the decoder; all of it where the model reads nothing but text."""
    return model.config.get_text_config(decoder=True)


def _layer_types(model: PreTrainedModel) -> list[str] | None:
    kinds: list[str] | None = getattr(text_config(model), "layer_types", None)
    return kinds


def _unsupported(model: PreTrainedModel, name: str, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{name} ({model.config.model_type}) is not supported: {reason}")


def _rotary_module(model: PreTrainedModel, name: str) -> nn.Module:
    found: list[nn.Module] = [
        module
        for module in model.modules()
        if any(buffer.endswith("inv_freq") for buffer, _ in module.named_buffers(recurse=False))
    ]
    if not found:
        raise _unsupported(
            model, name, "it has no rotary module: learned, ALiBi or absent positions cannot be moved, nor can states"
        )
    if len(found) > 1:
        raise _unsupported(model, name, f"it has {len(found)} rotary modules and its layers choose among them")
    return found[0]


def _probe_ids(model: PreTrainedModel) -> tuple[Tensor, Tensor]:
    vocab = model.get_input_embeddings().weight.shape[0]
    ids = torch.arange(1, _PROBE_TOKENS + 1, device=model.device)[None] % vocab
    return ids, torch.arange(_PROBE_TOKENS, device=model.device)[None]


def _run_probe(
    model: PreTrainedModel, name: str
) -> tuple[dict[int, tuple[Tensor, Tensor]], dict[int, nn.Module], dict[int, int | None]]:
    """Results of a plain pass by layer: rotated keys and values, the attention module, its sliding window."""
    modules: dict[int, nn.Module] = {}
    handles = [
        module.register_forward_pre_hook(lambda m, args: modules.__setitem__(m.layer_idx, m))
        for module in model.modules()
        if isinstance(getattr(module, "layer_idx", None), int) and hasattr(module, "is_causal")
    ]
    probe, plain = _Probe(), EncodePass(None)
    ids, positions = _probe_ids(model)
    try:
        run_decoder(model, ids, positions, probe, plain)
    except Exception as error:  # a foreign architecture may fail in any way; the reason is all that can be said
        raise _unsupported(model, name, f"it does not run on transformers' cache interface ({error})") from error
    finally:
        for handle in handles:
            handle.remove()
    if not probe.seen or set(modules) != set(probe.seen):
        raise _unsupported(model, name, "its layers do not hand keys and values to transformers' cache")
    if set(plain.windows) != set(probe.seen):
        raise _unsupported(model, name, "its layers do not call transformers' attention interface")
    for layer, (keys, values) in probe.seen.items():  # DiffLlama halves values behind its cache, JetMoE repeats heads
        received = plain.received[layer]
        if not (torch.equal(received[0], keys) and torch.equal(received[1], values)):
            raise _unsupported(model, name, f"layer {layer} attends to other keys or values than its cache gives it")
    return probe.seen, modules, plain.windows


def _check_windows(model: PreTrainedModel, name: str, windows: dict[int, int | None]) -> None:
    """A window that reaches attention only inside a ready-made mask would be lost here."""
    kinds = _layer_types(model) or ()
    hidden = [layer for layer, kind in enumerate(kinds) if kind == "sliding_attention" and windows.get(layer) is None]
    if hidden:
        raise _unsupported(model, name, f"sliding layer {hidden[0]} does not say how far it sees")


def _rotation_function(model: PreTrainedModel, name: str, module: nn.Module) -> Apply:
    apply: Apply | None = getattr(sys.modules[type(module).__module__], "apply_rotary_pos_emb", None)
    if apply is None:
        raise _unsupported(model, name, "its modelling file has no apply_rotary_pos_emb")
    return _with_partial(apply)


def _with_partial(apply: Apply) -> Apply:
    """Some families cut the rotated dimensions out before they call their function (Phi, Persimmon): do it for them.

    A function that handles partial rotary itself gets the whole head: `_verify` tells whether the guess was right.
    """

    def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        try:
            return apply(query, key, cos, sin)
        except RuntimeError:
            width = cos.shape[-1]
            first = apply(query[..., :width], key[..., :width], cos, sin)
            halves = zip(first, (query, key), strict=True)
            rotated_query, rotated_key = (torch.cat([r, whole[..., width:]], dim=-1) for r, whole in halves)
            return rotated_query, rotated_key

    return rotate


def _rotates(model: PreTrainedModel, name: str, module: nn.Module, rotary: nn.Module, layer: int) -> bool:
    """Call one attention module on the same input at two positions: its keys differ where it rotates."""
    takes = signature(module.forward).parameters
    cache_name = next((n for n in ("past_key_values", "layer_past", "past_key_value") if n in takes), "past_key_values")
    hidden = torch.randn(1, 1, text_config(model).hidden_size, generator=torch.Generator().manual_seed(layer))
    hidden = hidden.to(device=model.device, dtype=model.dtype)
    keys = []
    for position in (0, 3):
        probe = _Probe()
        at = torch.full((1, 1), position, device=model.device)
        kinds = _layer_types(model)
        angles = rotary(hidden, at, kinds[layer]) if takes_layer_type(rotary) and kinds else rotary(hidden, at)
        try:
            module(hidden_states=hidden, position_embeddings=angles, attention_mask=None, **{cache_name: probe})
            keys.append(probe.seen[layer][0])
        except Exception as error:  # see _run_probe
            raise _unsupported(model, name, f"layer {layer}'s attention has another signature ({error})") from error
    return not torch.equal(keys[0], keys[1])


def _shape(model: PreTrainedModel, name: str, seen: dict[int, tuple[Tensor, Tensor]]) -> CacheShape:
    sizes = {(k.shape[1], k.shape[3], v.shape[1], v.shape[3], k.dtype) for k, v in seen.values()}
    if len(sizes) > 1:
        raise _unsupported(model, name, "its layers have different numbers or widths of KV heads")
    heads, key_dim, value_heads, value_dim, dtype = sizes.pop()
    if heads != value_heads:
        raise _unsupported(model, name, "its keys and values have different numbers of heads")
    return CacheShape(len(seen), heads, key_dim, value_dim, dtype, seen[0][0].device)


def _verify(
    model: PreTrainedModel, name: str, rope: Rope, shape: CacheShape, true: dict[int, tuple[Tensor, Tensor]]
) -> None:
    """Encode the probe's tokens by every recipe, as they are always encoded, and compare with the plain pass.

    A model is causal, so that the beginning of a row is what it is in a longer row: a shorter chunk stands in each
    batch, behind which there is padding.
    """
    ids = _probe_ids(model)[0][0].tolist()
    whole, begun = _encoded(model, name, rope, shape, [ids, ids[:3]])
    _compare(model, name, rope, whole, true, 0, "isolated")
    _compare(model, name, rope, begun, true, 0, "isolated")
    prefix = [
        (rope.rotate(begun.layer_keys(layer)[:, :2], layer, 0)[None], begun.layer_values(layer)[None, :, :2])
        for layer in range(shape.num_layers)
    ]
    for block in _encoded(model, name, rope, shape, [ids[2:], ids[2:4]], prefix):
        _compare(model, name, rope, block, true, 2, "prefix")


def _encoded(
    model: PreTrainedModel,
    name: str,
    rope: Rope,
    shape: CacheShape,
    chunks: list[list[int]],
    prefix: Sequence[tuple[Tensor, Tensor]] = (),
) -> list[KVBlock]:
    try:
        return encode_batch(model, rope, shape, chunks, prefix)
    except Exception as error:  # see _run_probe
        what = "behind a prefix" if prefix else "alone"
        raise _unsupported(model, name, f"its chunks cannot be read {what} ({error})") from error


def _compare(
    model: PreTrainedModel,
    name: str,
    rope: Rope,
    block: KVBlock,
    true: dict[int, tuple[Tensor, Tensor]],
    start: int,
    recipe: str,
) -> None:
    """A block at its place against the plain pass, layer by layer."""
    places = slice(start, start + block.num_tokens)
    for layer, (keys, values) in true.items():
        if not _alike(rope.rotate(block.layer_keys(layer), layer, start), keys[0, :, places]):
            reason = f"rotating layer {layer}'s keys does not give the model's own keys back"
        elif not _alike(block.layer_values(layer), values[0, :, places]):
            reason = f"layer {layer}'s values are not the model's own"
        else:
            continue
        raise _unsupported(model, name, f"{reason} (recipe {recipe})")


def _alike(ours: Tensor, theirs: Tensor) -> bool:
    """[num_kv_heads, num_tokens, head_dim]. Where rounding is coarse a single token may differ: it was given to another
    expert."""
    distances = (ours.float() - theirs.float()).norm(dim=(0, 2)) / theirs.float().norm(dim=(0, 2)).clamp_min(1e-12)
    if ours.dtype == torch.float32:
        return bool(distances.max() < 1e-4)
    return bool(distances.median() < 0.1)


def describe_config(config: PreTrainedConfig) -> dict[str, Any]:
    """The configuration as JSON values, without what does not change a key: file names and library versions."""
    ignored = {"_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache", "architectures"}
    return {key: value for key, value in config.to_dict().items() if key not in ignored}
