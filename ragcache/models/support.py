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
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedConfig, PreTrainedModel

from ragcache.errors import UnsupportedModelError
from ragcache.kv.block import KVBlock
from ragcache.kv.buffers import BufferPool
from ragcache.kv.cache import FusedCache
from ragcache.kv.rope import Apply, Rope, takes_layer_type
from ragcache.kv.shape import ATTENTION_LAYERS, CacheShape, LayerKind, LayerShape, refuse_unbuilt
from ragcache.models.attention import EncodePass, FusedPass, hook_rotary
from ragcache.models.encoding import encode_batch, run_decoder
from ragcache.models.layerwise import decoder_layers, hook_layers

MOVING_ROPE = {
    "dynamic": "dynamic NTK scaling changes the rotary frequencies with the length of the prompt",
    "longrope": "LongRoPE changes the rotary frequencies with the length of the prompt",
}
_PROBE_TOKENS = 5


def refuse_by_config(config: PreTrainedConfig, name: str) -> None:
    """Raises UnsupportedModelError for obstacles that the configuration states, before any weights are read."""
    what = f"{name} ({config.model_type})"
    if getattr(config, "is_encoder_decoder", False):
        reason = "it is an encoder-decoder model; ragcache needs a causal language model"
        raise UnsupportedModelError(f"{what} is not supported: {reason}")
    text = config.get_text_config(decoder=True)
    refuse_unbuilt(what, _layer_kinds(text))
    if moves := _position_reason(text):
        raise UnsupportedModelError(f"{what} is not supported: {moves}")


def _layer_kinds(config: PreTrainedConfig) -> dict[str, LayerKind]:
    """Kinds of the layers, by the name of their type."""
    types = {str(kind) for kind in getattr(config, "layer_types", None) or ()}
    kinds = {kind: LayerKind.KV if kind in ATTENTION_LAYERS else LayerKind.STATE for kind in types}
    if getattr(config, "kv_lora_rank", None):
        kinds["multi-head latent attention"] = LayerKind.LATENT
    return kinds


def _position_reason(config: PreTrainedConfig) -> str | None:
    if getattr(config, "alibi", False) or getattr(config, "position_embedding_type", None) == "alibi":
        return "ALiBi adds a bias by distance to the scores; there is no rotation to move"
    for parameters in _rope_parameters(config):
        kind = str(parameters.get("rope_type", "default"))
        if kind in MOVING_ROPE:
            return MOVING_ROPE[kind]
        if parameters.get("llama_4_scaling_beta"):
            return "its queries grow with their position in the prompt, which a chunk that is read alone does not know"
    return None


def _rope_parameters(config: PreTrainedConfig) -> list[dict[str, Any]]:
    """One dictionary for all layers, or one a layer type."""
    parameters = getattr(config, "rope_parameters", None) or {}
    return [p for p in parameters.values() if isinstance(p, dict)] or [parameters]


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


class _Call(NamedTuple):
    """An attention module and the arguments that its layer called it with, by name."""

    module: nn.Module
    given: dict[str, object]


@torch.inference_mode()
def inspect(model: PreTrainedModel, name: str) -> Inspected:
    """Run a few tokens and learn the model's rotation. Raises UnsupportedModelError naming what stands in the way."""
    rotary = _rotary_module(model, name)
    true_keys, calls, windows = _run_probe(model, name)
    layers = sorted(true_keys)
    num_layers = int(text_config(model).num_hidden_layers)
    if layers != list(range(num_layers)):
        raise _unsupported(model, name, f"only {len(layers)} of {num_layers} layers keep keys and values")
    _check_windows(model, name, windows)
    modules = {layer: call.module for layer, call in calls.items()}
    apply = _rotation_function(model, name, modules[0])
    rotated = [_rotates(model, name, calls[layer], rotary, layer) for layer in layers]
    if not any(rotated):
        raise _unsupported(model, name, "no layer rotates its keys: its positions are not rotary")
    hook_rotary(rotary)
    hook_layers(decoder_layers(model, modules))
    shape = _shape(model, name, true_keys)
    rope = Rope(rotary, apply, _layer_types(model), rotated, [layer.key_dim for layer in shape.layers])
    _verify(model, name, rope, shape, true_keys)
    _verify_narrowing(model, name, shape, true_keys)
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
) -> tuple[dict[int, tuple[Tensor, Tensor]], dict[int, _Call], dict[int, int | None]]:
    """Results of a plain pass by layer: rotated keys and values, the call of its attention, its sliding window."""
    calls: dict[int, _Call] = {}

    def keep(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        named = dict(zip(signature(module.forward).parameters, args, strict=False))
        calls[module.layer_idx] = _Call(module, {**named, **kwargs})

    handles = [
        module.register_forward_pre_hook(keep, with_kwargs=True)
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
    if not probe.seen or set(calls) != set(probe.seen):
        raise _unsupported(model, name, "its layers do not hand keys and values to transformers' cache")
    if set(plain.windows) != set(probe.seen):
        raise _unsupported(model, name, "its layers do not call transformers' attention interface")
    for layer, (keys, values) in probe.seen.items():  # DiffLlama halves values behind its cache, JetMoE repeats heads
        received = plain.received[layer]
        if not (torch.equal(received[0], keys) and torch.equal(received[1], values)):
            raise _unsupported(model, name, f"layer {layer} attends to other keys or values than its cache gives it")
    return probe.seen, calls, plain.windows


def _check_windows(model: PreTrainedModel, name: str, windows: dict[int, int | None]) -> None:
    """A window that reaches attention only inside a ready-made mask would be lost here."""
    kinds = _layer_types(model) or ()
    hidden = [layer for layer, kind in enumerate(kinds) if kind == "sliding_attention" and windows.get(layer) is None]
    if hidden:
        raise _unsupported(model, name, f"sliding layer {hidden[0]} does not say how far it sees")


def _rotation_function(model: PreTrainedModel, name: str, module: nn.Module) -> Apply:
    apply = getattr(sys.modules[type(module).__module__], "apply_rotary_pos_emb", None)
    if apply is None:
        raise _unsupported(model, name, "its modelling file has no apply_rotary_pos_emb")
    if list(signature(apply).parameters)[1] == "cos":  # one tensor a call (Gemma 4)
        return _with_partial(lambda query, key, cos, sin: (apply(query, cos, sin), apply(key, cos, sin)))
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


def _rotates(model: PreTrainedModel, name: str, call: _Call, rotary: nn.Module, layer: int) -> bool:
    """Call a layer's attention as it was called, all its tokens at one position: its keys differ where it rotates."""
    given = {**call.given, "attention_mask": None}
    cache_name = next((n for n, value in given.items() if isinstance(value, Cache)), "past_key_values")
    like = torch.zeros(1, dtype=model.dtype, device=model.device)
    keys = []
    for position in (0, 3):
        probe = _Probe()
        at = torch.full((1, _PROBE_TOKENS), position, device=model.device)
        kinds = _layer_types(model)
        angles = rotary(like, at, kinds[layer]) if takes_layer_type(rotary) and kinds else rotary(like, at)
        try:
            call.module(**{**given, "position_embeddings": angles, cache_name: probe})
            keys.append(probe.seen[layer][0])
        except Exception as error:  # see _run_probe
            raise _unsupported(model, name, f"layer {layer}'s attention has another signature ({error})") from error
    return not torch.equal(keys[0], keys[1])


def _shape(model: PreTrainedModel, name: str, seen: dict[int, tuple[Tensor, Tensor]]) -> CacheShape:
    shapes = []
    for layer, (keys, values) in sorted(seen.items()):
        if keys.shape[1] != values.shape[1]:
            raise _unsupported(model, name, f"keys and values of layer {layer} have different numbers of heads")
        shapes.append(LayerShape(keys.shape[1], keys.shape[3], values.shape[3]))
    return CacheShape(tuple(shapes), seen[0][0].dtype, seen[0][0].device)


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


def _verify_narrowing(
    model: PreTrainedModel, name: str, shape: CacheShape, true: dict[int, tuple[Tensor, Tensor]]
) -> None:
    """Run the last tokens over the others' keys, with two that stand aside, as recompute methods run what they choose.

    A family whose layers take more by token than what is narrowed fails here.
    """
    ids, positions = _probe_ids(model)
    cache, held = FusedCache(BufferPool(shape, 0), _PROBE_TOKENS), _PROBE_TOKENS - 2
    cache.begin(positions[0, :held])
    run_decoder(model, ids[:, :held], positions[:, :held], cache, FusedPass(cache, positions[0, :held], True))
    aside = torch.tensor([held, held], device=model.device)  # any tokens at all, in front of the last two
    ids, positions = (
        torch.cat([ids[:, aside], ids[:, held:]], 1),
        torch.cat([positions[:, aside], positions[:, held:]], 1),
    )
    last = torch.tensor([2, 3], device=model.device)
    cache.begin(positions[0])
    try:
        current = FusedPass(cache, positions[0], True)
        run_decoder(model, ids, positions, cache, current, lambda point: None if point.layer else last)
    except Exception as error:  # see _run_probe
        raise _unsupported(model, name, f"its layers cannot run some of the tokens alone ({error})") from error
    for layer, (keys, values) in true.items():
        own = cache.layer_state(layer)
        if not (_alike(own[0][0], keys[0]) and _alike(own[1][0], values[0])):
            raise _unsupported(model, name, f"layer {layer} runs some of the tokens alone to other keys or values")


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
