"""Which models can be moved exactly, and the reason why others cannot.

Support is decided by a model's behaviour, not by its name: the configuration is read for the known obstacles, then a
few tokens are run to check that every layer calls transformers' attention interface, to find the layers that rotate,
and to check that the recordings of every recipe reproduce the model's own keys and values. A new family that follows
transformers' conventions needs no code here.

Every layer is checked alone, on the input that it had in the plain pass. Otherwise rounding in 16 bits would add up
over the layers, most of all at tokens with massive activations (special tokens, the first token): there the results of
a model in bfloat16 are 0.4 to 0.8 away from its own in float32. That noise says nothing about moved keys.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedConfig, PreTrainedModel

from ragcache.errors import UnsupportedModelError
from ragcache.kv import cache_shape
from ragcache.kv.buffers import BufferPool
from ragcache.kv.fused_cache import FusedCache
from ragcache.kv.rope import Apply, Rope, Source, ask, takes_layer_type, turn_pairs
from ragcache.models.attention import CURRENT, RANK, EncodePass, FusedPass, hook_latent, hook_rotary
from ragcache.models.card import longest_alike
from ragcache.models.encode import encode_batch
from ragcache.models.latent import LATENT, expand, tolerance
from ragcache.models.layerwise import hook_layers, walking
from ragcache.models.recurrence import Mixer, hook_mixers
from ragcache.models.watched_pass import Call, KeptCache, Watch
from ragcache.runtime import during

STATE_OBSTACLES = {
    "jamba": "its Mamba layers read several tokens without the state that enters them",
    "zamba": "its Mamba layers read several tokens without the state that enters them",
    "zamba2": "its layers share one attention, whose cache has no number of its own",
}
_PROBE_TOKENS = 5


def refuse_by_config(config: PreTrainedConfig, name: str) -> None:
    """Raise UnsupportedModelError for obstacles stated in the configuration, before any weights are read."""
    if getattr(config, "is_encoder_decoder", False):
        raise unsupported(config, name, "it is an encoder-decoder model; ragcache needs a causal language model")
    text = config.get_text_config(decoder=True)
    types = {str(kind) for kind in getattr(text, "layer_types", None) or ()}
    cache_shape.refuse_unbuilt(f"{name} ({config.model_type})", {kind: cache_shape.layer_kind(kind) for kind in types})
    obstacle = STATE_OBSTACLES.get(text.model_type)
    if getattr(text, "alibi", False) or getattr(text, "position_embedding_type", None) == "alibi":
        obstacle = obstacle or "ALiBi adds a bias by distance to the scores; there is no rotation to move"
    if obstacle:
        raise unsupported(config, name, obstacle)


def unsupported(config: PreTrainedConfig, name: str, reason: object) -> UnsupportedModelError:
    return UnsupportedModelError(f"{name} ({config.model_type}) is not supported: {reason}")


class _Plain(NamedTuple):
    """A plain pass over the probe's tokens, by layer.

    seen:    rotated keys and values, [1, num_kv_heads, num_tokens, head_dim]
    windows: sliding windows; None if a layer sees everything
    sources: the source of the layer's angles; None if it gets none
    """

    seen: dict[int, tuple[Tensor, Tensor]]
    windows: dict[int, int | None]
    sources: dict[int, Source | None]
    watch: Watch


def inspect(model: PreTrainedModel, name: str) -> tuple[Rope, cache_shape.CacheShape]:
    """Run a few tokens and find out the model's rotation. Raises UnsupportedModelError naming the obstacle."""
    try:
        return _inspect(model)
    except UnsupportedModelError as reason:
        raise unsupported(model.config, name, reason) from reason.__cause__


@torch.inference_mode()
def _inspect(model: PreTrainedModel) -> tuple[Rope, cache_shape.CacheShape]:
    """Do the work of `inspect`.

    Here and below, an UnsupportedModelError states only the reason; `inspect` adds the model's name.
    """
    mixers = hook_mixers(model)
    if not mixers and not _rotary_modules(model):
        raise UnsupportedModelError(
            "it has no rotary module: learned, ALiBi or absent positions cannot be moved, nor can states"
        )
    plain = _run_probe(model)
    if "logits_to_keep" not in signature(model.forward).parameters:
        raise UnsupportedModelError("it gives out logits of every token, not of those that are asked for alone")
    calls, layers = plain.watch.calls, sorted(plain.seen)
    kinds = _layer_types(model) or []
    kept = [kind for kind in kinds if cache_shape.keeps_kv(kind)]  # numbered like attention modules
    expected = len(kept) if mixers and kinds else int(text_config(model).num_hidden_layers)
    if layers != list(range(expected)):
        raise UnsupportedModelError(f"only {len(layers)} of {expected} layers keep keys and values")
    if not mixers and set(plain.watch.left) != set(layers):  # LongCat
        raise UnsupportedModelError("its decoder layers hold several attentions each: no token can stand aside in one")
    # A window that reaches attention only inside a prepared mask would be ignored here.
    sliding = [layer for layer, kind in enumerate(kept) if kind == "sliding_attention"]
    if hidden := [layer for layer in sliding if plain.windows.get(layer) is None]:
        raise UnsupportedModelError(f"sliding layer {hidden[0]} does not say how far it sees")
    modules = {layer: call.module for layer, call in calls.items()}
    sources = [_rotates(model, calls[layer], plain.sources[layer], layer) for layer in layers]
    if not (any(sources) or mixers):
        raise UnsupportedModelError("no layer rotates its keys: its positions are not rotary")
    apply = _rotation_function(modules[0]) if any(sources) else lambda query, key, _cos, _sin: (query, key)
    latent = frozenset(n for n, module in modules.items() if hasattr(module, LATENT))
    shape = _shape(plain.seen, latent)
    for layer in latent:
        hook_latent(modules[layer], shape.layers[layer].key_dim, shape.layers[layer].value_dim)
    if mixers:
        numbers = [int(modules[layer].layer_idx) for layer in layers]  # type: ignore[arg-type]
        shape = replace(shape, states=_learn_states(model, mixers), numbers=tuple(numbers))
    else:
        hook_layers(model, modules)
    widths = [layer.key_dim for layer in shape.layers]
    rope = Rope(sources, apply, widths, longest_alike(text_config(model))[0])
    for rotary in rope.modules:
        hook_rotary(rotary)
    _verify(model, rope, shape, plain)
    if not mixers:  # running some of the tokens alone would lose the state between them
        _verify_narrowing(model, shape, plain)
    return rope, shape


def _learn_states(model: PreTrainedModel, mixers: Sequence[Mixer]) -> tuple[cache_shape.StateShape, ...]:
    expected = sum(map(cache_shape.keeps_state, _layer_types(model) or ()))
    if expected != len(mixers):
        raise UnsupportedModelError(f"{len(mixers)} of {expected} recurrent layers have a short convolution")
    shapes = []
    for mixer in mixers:
        found = mixer.learn()
        if isinstance(found, str):
            raise UnsupportedModelError(f"recurrent layer {mixer.number} {found}")
        shapes.append(found)
    return tuple(shapes)


def text_config(model: PreTrainedModel) -> PreTrainedConfig:
    """Return the part of the configuration that describes the decoder; for a model that reads only text, the whole."""
    return model.config.get_text_config(decoder=True)


def _layer_types(model: PreTrainedModel) -> list[str] | None:
    kinds: list[str] | None = getattr(text_config(model), "layer_types", None)
    return kinds


def _rotary_modules(model: PreTrainedModel) -> list[nn.Module]:
    return [
        module
        for module in model.modules()
        if any(buffer.endswith("inv_freq") for buffer, _ in module.named_buffers(recurse=False))
    ]


def _probe_ids(model: PreTrainedModel) -> tuple[Tensor, Tensor]:
    """Return ordinary tokens from all over the vocabulary, and their positions.

    Special tokens, on which activations are massive, are at the vocabulary's ends.
    """
    vocab, config = model.get_input_embeddings().weight.shape[0], text_config(model)
    named = [getattr(config, f"{kind}_token_id", None) for kind in ("bos", "eos", "pad")]
    special = {id for ids in named for id in (ids if isinstance(ids, list) else [ids])}
    ordinary = [id for id in range(vocab) if id not in special] or [0]
    ids = [ordinary[len(ordinary) * (2 * n + 1) // (2 * _PROBE_TOKENS)] for n in range(_PROBE_TOKENS)]
    return torch.tensor([ids], device=model.device), torch.arange(_PROBE_TOKENS, device=model.device)[None]


def _run_probe(model: PreTrainedModel) -> _Plain:
    probe, plain, watch = KeptCache(), EncodePass(None), Watch()
    ids, positions = _probe_ids(model)
    rotaries: dict[int, nn.Module] = {}  # rotary modules by the identity of their output
    kept: list[object] = []

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        rotaries[id(output)] = module
        kept.append(output)

    handles = [rotary.register_forward_hook(keep) for rotary in _rotary_modules(model)]
    try:
        with watch.watching(model), during(CURRENT, plain):
            model.base_model(input_ids=ids, position_ids=positions, past_key_values=probe, use_cache=True)
    except Exception as error:  # an unknown architecture may fail in any way; only the reason can be reported
        dtypes = sorted({str(weight.dtype).removeprefix("torch.") for weight in model.parameters()})
        mixed = f"; its weights mix {' and '.join(dtypes)}: bring it to one dtype, such as by model.float()"
        reason = f"it does not run on transformers' cache interface ({error}){mixed if len(dtypes) > 1 else ''}"
        raise UnsupportedModelError(reason) from error
    finally:
        for handle in handles:
            handle.remove()
    ranked = any(hasattr(call.module, RANK) for call in watch.calls.values())
    if ranked:  # by index, as attention modules are numbered
        probe.seen = {rank: probe.seen[number] for rank, number in enumerate(sorted(probe.seen))}
    if not probe.seen or set(watch.calls) != set(probe.seen):
        raise UnsupportedModelError("its layers do not hand keys and values to transformers' cache")
    if set(plain.windows) != set(probe.seen):
        raise UnsupportedModelError("its layers do not call transformers' attention interface")
    sources: dict[int, Source | None] = {}
    for layer, call in watch.calls.items():  # DiffLlama halves values after its cache, JetMoE repeats heads
        received, (keys, values) = plain.received[layer], expand(call.module, _in_order(call.module, probe.seen[layer]))
        if not (torch.equal(received[0], keys) and torch.equal(received[1], values)):
            raise UnsupportedModelError(f"layer {layer} attends to other keys or values than its cache gives it")
        alone = called.pop() if len(called := set(rotaries.values())) == 1 else None
        rotary = rotaries.get(id(call.given.get("position_embeddings")), alone)
        kinds = None if ranked else _layer_types(model)  # types cover all layers, ranks only some
        by_type = rotary is not None and kinds is not None and takes_layer_type(rotary)
        sources[layer] = None if rotary is None else (rotary, kinds[layer] if by_type and kinds else None)
    seen = {layer: _in_order(watch.calls[layer].module, pair) for layer, pair in probe.seen.items()}
    return _Plain(seen, plain.windows, sources, watch)


def _in_order(module: nn.Module, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the pair with the rotated part first; see `CacheShape.in_order`."""
    return (pair[1], pair[0]) if hasattr(module, LATENT) else pair


def _rotation_function(module: nn.Module) -> Apply:
    apply = getattr(sys.modules[type(module).__module__], "apply_rotary_pos_emb", None)
    if apply is None and hasattr(sys.modules[type(module).__module__], "apply_rotary_emb"):  # of complex angles
        return turn_pairs
    if apply is None:
        raise UnsupportedModelError("its modelling file has no apply_rotary_pos_emb")
    if list(signature(apply).parameters)[1] == "cos":  # one tensor per call (Gemma 4)
        return _with_partial(lambda query, key, cos, sin: (apply(query, cos, sin), apply(key, cos, sin)))
    return _with_partial(apply)


def _with_partial(apply: Apply) -> Apply:
    """Wrap a rotation function so that it also takes heads that are wider than the angles.

    Some families cut the rotated dimensions out before they call their function (Phi, Persimmon); the wrapper does the
    same. A function that handles partial rotary itself gets the whole head: `_verify` shows whether the guess was
    right.
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


def _rotates(model: PreTrainedModel, call: Call, source: Source | None, layer: int) -> Source | None:
    """Return the source of a layer's angles, or None if the layer does not rotate.

    Its attention is called twice, each time with all tokens at the same position: if it rotates, its keys differ.
    """
    if source is None:
        return None
    arguments = {**call.given, "attention_mask": None}
    cache_name = next((n for n, value in arguments.items() if isinstance(value, Cache)), "past_key_values")
    like = torch.zeros(1, dtype=model.dtype, device=model.device)
    keys = []
    for position in (0, 3):
        probe = KeptCache()
        angles = ask(source, like, torch.full((1, _PROBE_TOKENS), position, device=model.device))
        try:
            call.module(**{**arguments, "position_embeddings": angles, cache_name: probe})
            keys.append(_in_order(call.module, next(iter(probe.seen.values())))[0])
        except Exception as error:  # see _run_probe
            raise UnsupportedModelError(f"layer {layer}'s attention has another signature ({error})") from error
    return None if torch.equal(keys[0], keys[1]) else source


def _shape(seen: dict[int, tuple[Tensor, Tensor]], latent: frozenset[int]) -> cache_shape.CacheShape:
    shapes = []
    for layer, (keys, values) in sorted(seen.items()):
        if keys.shape[1] != values.shape[1]:
            raise UnsupportedModelError(f"keys and values of layer {layer} have different numbers of heads")
        shapes.append(cache_shape.LayerShape(keys.shape[1], keys.shape[3], values.shape[3]))
    return cache_shape.CacheShape(tuple(shapes), seen[0][0].dtype, seen[0][0].device, latent)


def _verify(model: PreTrainedModel, rope: Rope, shape: cache_shape.CacheShape, plain: _Plain) -> None:
    """Encode the probe's tokens by every recipe, as in normal use, and compare with the plain pass.

    A model is causal, so the beginning of a row is the same in a longer row: each batch has a shorter chunk, with
    padding after it. The prefix is the plain pass's own, because scores may be so large that the last bit of a key
    decides which token attends to which.
    """
    ids = _probe_ids(model)[0][0].tolist()
    _verify_recipe(model, rope, shape, plain, [ids, ids[:3]])
    prefix = [(keys[:, :, :2], values[:, :, :2]) for _, (keys, values) in sorted(plain.seen.items())]
    _verify_recipe(model, rope, shape, plain, [ids[2:], ids[2:4]], prefix)


def _verify_recipe(
    model: PreTrainedModel,
    rope: Rope,
    shape: cache_shape.CacheShape,
    plain: _Plain,
    chunks: list[list[int]],
    prefix: Sequence[tuple[Tensor, Tensor]] = (),
) -> None:
    """Compare blocks, moved to their positions, with the plain pass, layer by layer."""
    start, recipe = (prefix[0][0].shape[2], "prefix") if prefix else (0, "isolated")
    watch = Watch()
    try:
        with watch.watching(model, plain.watch, slice(start, None)):
            blocks = encode_batch(model, rope, shape, chunks, prefix)
    except Exception as error:  # see _run_probe
        place = "behind a prefix" if prefix else "alone"
        raise UnsupportedModelError(f"its chunks cannot be read {place} ({error})") from error
    for row, block in enumerate(blocks):
        places, own = slice(start, start + block.num_tokens), slice(0, block.num_tokens)
        for layer, (keys, values) in plain.seen.items():
            if not same(rope.rotate(block.layer_keys(layer), layer, start), keys[0, :, places]):
                reason = f"rotating layer {layer}'s keys does not give the model's own keys back"
            elif not same(block.layer_values(layer), values[0, :, places]):
                reason = f"layer {layer}'s values are not the model's own"
            elif not same(watch.attended[layer][row, None, own], plain.watch.attended[layer][:, places]):
                reason = f"layer {layer}'s attention does not give the model's own output"
            else:
                continue
            raise UnsupportedModelError(f"{reason} (recipe {recipe})")


def _verify_narrowing(model: PreTrainedModel, shape: cache_shape.CacheShape, plain: _Plain) -> None:
    """Run the last tokens over the others' keys, with two more tokens skipped, as recompute methods run chosen tokens.

    A family whose layers take more per-token inputs than are narrowed fails here.
    """
    ids, positions = _probe_ids(model)
    cache, held = FusedCache(BufferPool(shape, 0), _PROBE_TOKENS), _PROBE_TOKENS - 2
    first = positions[:, :held]
    cache.begin(first[0])
    with Watch().watching(model, plain.watch, slice(held)), during(CURRENT, FusedPass(cache, first[0], True)):
        model.base_model(input_ids=ids[:, :held], position_ids=first, past_key_values=cache, use_cache=True)
    aside = torch.tensor([held, held], device=model.device)  # arbitrary tokens, before the last two
    ids, positions = (
        torch.cat([ids[:, aside], ids[:, held:]], 1),
        torch.cat([positions[:, aside], positions[:, held:]], 1),
    )
    last = torch.tensor([2, 3], device=model.device)
    cache.begin(positions[0])
    watch = Watch()
    try:
        with (
            watch.watching(model, plain.watch, slice(held, None)),
            during(CURRENT, FusedPass(cache, positions[0], True)),
            walking(lambda point: None if point.layer else last),
        ):
            model.base_model(input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True)
    except Exception as error:  # see _run_probe
        raise UnsupportedModelError(f"its layers cannot run some of the tokens alone ({error})") from error
    for layer, (keys, values) in plain.seen.items():
        own, left = cache.layer_state(layer), plain.watch.left[layer][..., held:, :]
        if not (same(own[0][0], keys[0]) and same(own[1][0], values[0]) and _same_mostly(watch.left[layer], left)):
            raise UnsupportedModelError(f"layer {layer} runs some of the tokens alone to something else")


def same(ours: Tensor, theirs: Tensor) -> bool:
    """Return whether two results, [any, num_tokens, width], of the same input differ by at most a few roundings."""
    return bool(_distances(ours, theirs).max() < tolerance(ours.dtype))


def _same_mostly(ours: Tensor, theirs: Tensor) -> bool:
    """Apply `same` to layers' outputs. In 16 bits a single token may differ, if rounding sent it to another expert."""
    distances = _distances(ours, theirs)
    return bool((distances.max() if ours.dtype == torch.float32 else distances.median()) < tolerance(ours.dtype))


def _distances(ours: Tensor, theirs: Tensor) -> Tensor:
    """Return the distance of each token, relative to the token's own norm."""
    apart, own = (ours.float() - theirs.float()).norm(dim=(0, 2)), theirs.float().norm(dim=(0, 2))
    distances: Tensor = apart / own.clamp_min(1e-12)
    return distances


def describe_config(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the configuration as JSON values, without entries that change no key: file names and library versions."""
    ignored = {"_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache", "architectures"}
    return {key: value for key, value in config.to_dict().items() if key not in ignored}
