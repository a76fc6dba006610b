"""Load a causal language model by bundled name, directory or hub id."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash
from transformers import PreTrainedConfig, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from ragcache import errors
from ragcache.kv.block_key import digest
from ragcache.models import checkpoint
from ragcache.models.adapter import Adapter
from ragcache.models.attention import NAME, register
from ragcache.models.card import ModelCard
from ragcache.models.checkpoint_digest import checkpoint_digest
from ragcache.models.hub import ADAPTER, BUNDLED, resolve, split_file
from ragcache.models.language_model import LanguageModel
from ragcache.models.lora import Lora
from ragcache.models.machine import AUTO, find_device, suits
from ragcache.models.packed import pack
from ragcache.models.pull import obtain
from ragcache.models.support import describe_config, inspect, refuse_by_config
from ragcache.models.trained_tokens import TrainedTokens
from ragcache.runtime import team_ends

log = logging.getLogger(__name__)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
INSPECTED = "_ragcache_inspected"
WAY_OUT = "name a model or its directory, or give a model of transformers (of peft: model.merge_and_unload())"


@team_ends()
def load_lm(
    name: str | Path | PreTrainedModel,
    *,
    tokenizer: Tokenizer | None = None,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device = AUTO,
    packed: bool | None = None,
) -> LanguageModel:
    """Load a model and find out how its keys are rotated.

    name:  "mini" (bundled, trained for reuse), "mini-base" (before that training); "smollm2" (SmolLM2-135M-Instruct,
           fetched once: `models/pull.py`), a directory in Hugging Face layout, a hub id, an adapter's directory
           (`models/adapter.py`), a directory with a LoRA adapter (peft), which is merged into its base; a GGUF file (or
           `hub id/file`, or a directory that holds only that file), which is dequantised to `dtype`; or a transformers
           model that is already loaded
    tokenizer: the tokenizer of a loaded model; None: load it from where the model was loaded
    dtype: "float32", "bfloat16", "float16", or "auto" for the dtype that the weights were saved in (float32 if the
           checkpoint states none, as in a GGUF file, or if the processor has no instructions for it). None: "auto",
           and float32 for the bundled models
    device: "cpu", "cuda", ...; "auto": the first available of cuda, xpu, mps, cpu
    packed: keep a second copy of the weights in the layout that a CPU multiplies by fastest (`models/packed.py`), which
            speeds up decoding and short passes. None: only if the copy takes at most an eighth of the machine's memory

    An already loaded model keeps its dtype and device. From then on it runs with ragcache's attention and without
    gradients, and must not be changed.

    Raises ModelNotFoundError if there is no model with that name, AdapterError for an adapter that is damaged or
    belongs to another base, UnsupportedModelError naming the reason if its keys cannot be moved exactly, ConfigError
    for an unknown dtype or device, or for a checkpoint trained for reuse whose section in config.json does not fit its
    vocabulary or tokenizer.
    """
    register()
    if isinstance(name, PreTrainedModel):
        return _take(name, tokenizer, packed)
    errors.check_type("model", name, (str, Path), WAY_OUT)
    base, adapter, lora, config, own_tokenizer, reuse = _find(name)
    place = find_device(device)
    usual = "float32" if base in map(resolve, BUNDLED) else AUTO  # the bundled models are in bfloat16 to be small
    model = checkpoint.load_weights(base, config, _dtype(dtype or usual, config, place, str(name)), place)
    if adapter is not None:
        adapter.check_base(checkpoint_digest(resolve(adapter.base.name)))
        model = adapter.apply(model)
    if lora is not None:
        model = lora.merge(model)
    if file := split_file(base_of(name))[1]:  # as transformers states it: a file and its copy are the same model
        model.config.quantization_config = {"quant_method": "gguf", **file, "dequantize": False}
    beside = adapter.lora() if adapter is not None and adapter.on_passages else None
    return _learn(model, own_tokenizer, str(name), reuse, packed, beside)


def _take(model: PreTrainedModel, tokenizer: Tokenizer | None, packed: bool | None) -> LanguageModel:
    """Return a LanguageModel for a model that is already loaded.

    Its name is marked so that it is never loaded by name: the place it came from may hold other weights by then.
    """
    origin = model.name_or_path
    name = f"{checkpoint.LOADED}{Path(origin).name or model.config.model_type}"
    refuse_by_config(model.config, name)
    if tokenizer is None and origin and (directory := checkpoint.find_directory(origin)) is not None:
        tokenizer = checkpoint.load_tokenizer(str(directory))
    model.set_attn_implementation(NAME)
    model.eval().requires_grad_(False)
    return _learn(model, tokenizer, name, _reuse(model.config, name), packed)


def _learn(
    model: PreTrainedModel,
    tokenizer: Tokenizer | None,
    name: str,
    reuse: TrainedTokens | None,
    packed: bool | None,
    beside: Lora | None = None,
) -> LanguageModel:
    """Inspect a model and return it as a LanguageModel.

    beside: matrices that act on passages alone. They are attached after the inspection, which compares passages' keys
            with the base's own
    """
    stated = getattr(model.config, "quantization_config", None)
    if getattr(stated, "quant_method", None) == "bitsandbytes" and model.device.type == "cpu":
        raise errors.UnsupportedModelError(
            f"{name} is not supported: bitsandbytes' weights on a CPU change when they are read; use a GGUF file, "
            "torchao's weights or a GPU"
        )
    if not hasattr(model, INSPECTED):  # once: it hooks the model's modules
        setattr(model, INSPECTED, inspect(model, name))
    rope, shape = getattr(model, INSPECTED)
    if beside is not None:
        beside.attach(model)
    mark = fingerprint(model, tokenizer)
    pack(model, packed)
    lm = LanguageModel(model, tokenizer, rope, shape, mark, name, reuse)
    if reuse is not None:
        reuse.check(lm.vocab_size, tokenizer, name)
    return lm


def load_card(name: str | Path, fingerprint: str) -> ModelCard:
    """Load a model without its weights, for an engine elsewhere that has them.

    fingerprint: the fingerprint that `load_lm` would give the model

    Raises the errors of `load_lm` that concern configuration and tokenizer.
    """
    base, adapter, _, config, tokenizer, reuse = _find(name)
    if adapter is not None:
        adapter.extend(config)
    vocab_size = int(config.get_text_config(decoder=True).vocab_size)
    card = ModelCard(config, checkpoint.load_generation(base), tokenizer, vocab_size, fingerprint, str(name), reuse)
    if reuse is not None:
        reuse.check(vocab_size, tokenizer, str(name))
    return card


class _Found(NamedTuple):
    """The parts of a named model, except its weights.

    base:    directory or hub id of weights and configuration
    adapter, lora: the adapter with this name, as ragcache or as peft alone wrote it; None: it is no such adapter
    reuse:   how the adapter, or else the base, was trained for reuse
    """

    base: str
    adapter: Adapter | None
    lora: Lora | None
    config: PreTrainedConfig
    tokenizer: Tokenizer | None
    reuse: TrainedTokens | None


def _find(name: str | Path) -> _Found:
    """Load all parts of a model but its weights. Raises the errors of `load_card`."""
    where = obtain(name)
    adapter = Adapter.find(where)
    lora = Lora.find(where) if adapter is None else None
    beside = adapter.base.name if adapter is not None else lora.base if lora is not None else None
    base = where if beside is None else obtain(beside)
    try:
        config = checkpoint.load_config(base, name if beside is None else beside)
    except errors.ModelNotFoundError as error:
        if beside is None:
            raise
        place = f'{ADAPTER} under "base"' if adapter is not None else f'{Lora.FILE} under "{Lora.BASE}"'
        raise errors.AdapterError(
            f"{name}: {error}; put the base model there, or write where it is into {place}"
        ) from error
    refuse_by_config(config, str(name))
    tokenizer = checkpoint.load_tokenizer(where)
    if adapter is None:
        tokenizer = tokenizer or (checkpoint.load_tokenizer(base) if lora is not None else None)
        return _Found(base, None, lora, config, tokenizer, _reuse(config, str(name)))
    adapter.check(config, tokenizer)
    return _Found(base, adapter, None, config, tokenizer, adapter.spec)


def base_of(name: str | Path) -> str:
    """Return the directory or hub id of the weights and the configuration: `resolve`, or an adapter's base."""
    where = resolve(name)
    adapter = Adapter.find(where)
    if adapter is not None:
        return resolve(adapter.base.name)
    lora = Lora.find(where)
    return where if lora is None else resolve(lora.base)


def _dtype(dtype: str | torch.dtype, config: PreTrainedConfig, device: torch.device, name: str) -> torch.dtype:
    if isinstance(dtype, torch.dtype):
        dtype = str(dtype).removeprefix("torch.")
    if dtype == AUTO:
        own = next((known for known in DTYPES.values() if known == getattr(config, "dtype", None)), torch.float32)
        if suits(own, device):
            return own
        kind = str(own).removeprefix("torch.")
        log.warning(
            "%s is loaded in float32: its weights are in %s, for which this processor has no instructions and takes "
            "several times as long; --dtype %s halves their memory all the same, --codec bfloat16 the stored KV",
            *(name, kind, kind),
        )
        return torch.float32
    errors.check_choice("dtype", dtype, ("auto", *DTYPES))
    return DTYPES[dtype]


def _reuse(config: PreTrainedConfig, name: str) -> TrainedTokens | None:
    try:
        return TrainedTokens.of(config)
    except errors.ConfigError as error:
        raise errors.ConfigError(f"{name}: {error}") from error


def fingerprint(model: PreTrainedModel, tokenizer: Tokenizer | None) -> str:
    """Return the SHA-256 over the weights, the configuration with its RoPE parameters, the tokenizer and the dtype.

    A merged or attached adapter changes the weights' names or bytes, and so the fingerprint.
    """
    weights = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        weights.update(name.encode())
        weights.update(_tensor_digest(tensor))
    parts: dict[str, Any] = {
        "weights": weights.hexdigest(),
        "config": _jsonable(describe_config(model.config)),
        "tokenizer": None if tokenizer is None else _tokenizer_digest(tokenizer),
        "dtype": str(model.dtype),
    }
    return digest(parts)


def _tensor_digest(tensor: torch.Tensor) -> bytes:
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is not None:  # quantised: a tensor of tensors
        names, _ = flatten()
        return b"".join(name.encode() + _tensor_digest(getattr(tensor, name)) for name in names)
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu()
    value: bytes = xxhash.xxh3_128_digest(flat.numpy().data)
    return value


def _tokenizer_digest(tokenizer: Tokenizer) -> str:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        return hashlib.sha256(backend.to_str().encode()).hexdigest()
    return digest(sorted(tokenizer.get_vocab().items()))


def _jsonable(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_jsonable(item) for item in value]
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)
