"""Read a checkpoint from a directory, the hub or a GGUF file: its configuration, weights and tokenizer."""

from __future__ import annotations

import json
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING as IMAGE_READERS
from transformers import PreTrainedTokenizerBase as Tokenizer

from ragcache.errors import ModelNotFoundError, UnsupportedModelError, first_line
from ragcache.models.attention import NAME
from ragcache.models.gguf_header import read_header
from ragcache.models.gguf_keys import amend_config, refuse_arrays, refuse_unread_tensors
from ragcache.models.gguf_tokenizer import amend_tokenizer, end_ids
from ragcache.models.hub import BUNDLED, GGUF, refuse_absent, split_file
from ragcache.models.named import CONFIG
from ragcache.models.support import unsupported

TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "*.tiktoken")
LOADED = "loaded:"  # begins the name of a model that the caller gave as an object, which cannot be loaded by name
# The errors of transformers and the readers of its formats for unusable files.
UNREADABLE = (OSError, ValueError, KeyError, IndexError, RuntimeError, SafetensorError, struct.error)


def load_config(where: str, name: str | Path) -> PreTrainedConfig:
    """Load the configuration of the model at `where`: a directory, hub id or GGUF file.

    name: the name that the caller gave, for errors

    Raises ModelNotFoundError; UnsupportedModelError for a model that needs Python code of its own, or a GGUF file whose
    architecture or keys are not supported.
    """
    place, file = split_file(where)
    if not file and Path(where).exists() and not (Path(where) / "config.json").is_file():
        files = sorted(path.name for path in Path(where).glob(f"*{GGUF}"))
        found = f"; it has {len(files)} GGUF files: name one, such as {name}/{files[0]}" if files else ""
        raise ModelNotFoundError(f"{name} is not a model directory: it has no config.json{found}")
    if where.startswith(LOADED):
        raise ModelNotFoundError(
            f"the store was made with a loaded model ({where}); give it again: RagCache.open(..., model=...)"
        )
    refuse_absent(place, str(name), BUNDLED)
    try:
        if not file:
            return AutoConfig.from_pretrained(place, trust_remote_code=False)
        refuse_arrays(header := read_header(Path(where)))
        config = AutoConfig.from_pretrained(place, trust_remote_code=False, **file)
        amend_config(config, header)
        return config
    except UNREADABLE as error:
        refuse_own_code(place, str(name), error)
        if file and "architecture" in str(error):
            raise UnsupportedModelError(f"{name} is not supported: {first_line(error)}") from error
        again = "; it is no whole GGUF file of a language model: get it again" if file else ""
        raise ModelNotFoundError(f"cannot load a model under {str(name)!r}: {first_line(error)}{again}") from error


def auto_class(config: PreTrainedConfig) -> Any:
    """Return the transformers class that makes a model of this configuration.

    A model that also reads images, and has no class for text alone, is loaded as a whole; only its text part is used.
    """
    alone = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or type(config) not in IMAGE_READERS
    return AutoModelForCausalLM if alone else AutoModelForImageTextToText


def load_weights(where: str, config: PreTrainedConfig, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """Load the model at `where`, with ragcache's attention and without gradients.

    Raises ModelNotFoundError if weights are missing or are not of this configuration, UnsupportedModelError for a kind
    of model that cannot be loaded.
    """
    place, file = split_file(where)
    try:
        model, report = auto_class(config).from_pretrained(
            place,
            config=config,
            dtype=dtype,
            attn_implementation=NAME,
            output_loading_info=True,
            trust_remote_code=False,
            **file,
        )
    except UNREADABLE as error:
        refuse_own_code(place, where, error)
        if type(config) not in {*MODEL_FOR_CAUSAL_LM_MAPPING, *IMAGE_READERS}:
            raise unsupported(config, where, "transformers has no causal language model of this kind") from error
        if isinstance(error, KeyError) and NAME in error.args:  # a family with attention classes of its own
            raise unsupported(config, where, "it does not use transformers' attention interface") from error
        if "ignore_mismatched_sizes" in str(error):
            raise _other_weights(where, config, "some have other shapes") from error
        raise ModelNotFoundError(f"cannot load a causal language model from {where!r}: {first_line(error)}") from error
    missing = sorted(report["missing_keys"])
    if missing:  # transformers would continue with random numbers instead
        raise ModelNotFoundError(f"{where} lacks {len(missing)} of its weights, such as {missing[0]}; get it again")
    known = {f"{place}." for place, module in model.named_modules() if getattr(module, "weight", None) is not None}
    for name in sorted(report["unexpected_keys"]):  # such as a bias that this family lacks: another model's
        if name.removesuffix(name.rpartition(".")[2]) in known:
            raise _other_weights(where, config, f"{name} has no place in it")
    if file:
        header = read_header(Path(where))
        refuse_unread_tensors(model, header)
        model.generation_config.eos_token_id = end_ids(header) or None
    model.eval().requires_grad_(False)
    return model.to(device)


def _other_weights(where: str, config: PreTrainedConfig, reason: str) -> ModelNotFoundError:
    return ModelNotFoundError(
        f"{where}: its config.json says {config.model_type}, and its weights are not of such a model: {reason}; get "
        "the config.json that belongs to them"
    )


def load_tokenizer(where: str) -> Tokenizer | None:
    """Load the tokenizer at `where`; return None if no tokenizer is there.

    Raises UnsupportedModelError if it needs Python code of its own.
    """
    place, file = split_file(where)
    found = (path for name in TOKENIZER_FILES for path in Path(place).glob(name))
    if Path(place).is_dir() and not file and not any(found):
        return None  # transformers makes up an empty one for some families
    try:
        tokenizer = AutoTokenizer.from_pretrained(place, trust_remote_code=False, **file)
    except (OSError, ValueError, KeyError) as error:
        refuse_own_code(place, where, error)
        return None  # a model without tokenizer files still runs on ids
    if file:
        amend_tokenizer(tokenizer, read_header(Path(where)))
    return tokenizer


def find_directory(name: str) -> Path | None:
    """Return the directory of a model's files on this machine; None if they are not here.

    name: a directory or hub id
    """
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except Exception:  # the hub's client raises its own errors, httpx's and the system's: all mean that it is not here
        return None


def refuse_own_code(where: str, name: str, error: Exception) -> None:
    """Raise UnsupportedModelError if transformers raised `error` because a model needs Python code of its own.

    Args:
        where: The model's directory or hub id, whose auto_map the message shows.
        name: The name that the caller gave.
    """
    if "trust_remote_code" not in str(error):
        return
    maps, directory = [], find_directory(where)
    for file in (CONFIG, "tokenizer_config.json"):
        with suppress(OSError, ValueError, TypeError, KeyError):
            maps.append(f"{file}: {json.loads((Path(directory or where) / file).read_bytes())['auto_map']}"[:300])
    raise UnsupportedModelError(
        f"{name} is not supported: its auto_map ({'; '.join(maps)}) names Python code of its own, which ragcache never "
        "runs; use a model whose architecture is part of transformers"
    ) from error


def load_generation(where: str) -> GenerationConfig | None:
    """Load the generation configuration at `where`; return None if no such file is there."""
    place, file = split_file(where)
    if file:
        return GenerationConfig(eos_token_id=end_ids(read_header(Path(where))) or None)
    try:
        return GenerationConfig.from_pretrained(place)
    except (OSError, ValueError):
        return None  # transformers then makes one of the model's configuration, which is read anyway
