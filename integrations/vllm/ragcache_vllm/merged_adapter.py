"""Merging of an adapter and its base into a Hugging Face directory, for an engine that knows no adapters.

Files of the base are linked; config.json and the files with the embedding or a separate head are rewritten.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from ragcache.errors import AdapterError, ModelMismatchError, translate_os_errors
from ragcache.models.adapter import Adapter
from ragcache.models.checkpoint import LOADED, find_directory
from ragcache.models.checkpoint_digest import checkpoint_digest
from ragcache.models.hub import resolve, split_file
from ragcache.models.lora import Lora
from ragcache.models.trained_tokens import SECTION

TOKENIZER_FILES = ("*token*", "vocab*", "merges*", "*.model", "*.tiktoken", "chat_template*")


def servable(name: str, checkpoint: str, into: Path) -> tuple[str, str]:
    """Return the directory or hub id from which any engine can load a model, and the digest of its files.

    checkpoint: expected digest of the model
    into: folder for merged directories

    For a model that is not an adapter these are the model itself and `checkpoint`. For an adapter they are those of the
    directory that `merge` writes. Matrices of the adapter that act on passages alone are not merged: their effect is in
    the blocks, and the engine reads other tokens with the base's weights.

    Raises ModelMismatchError if the adapter's files have another digest, and AdapterError.
    """
    where = resolve(name)
    adapter = Adapter.find(where) if where else None
    is_merged = where and Lora.find(where) is not None and not (adapter is not None and adapter.on_passages)
    if where.startswith(LOADED) or split_file(where)[1] or is_merged:
        raise AdapterError(
            f"{name}: no directory holds this model's weights; write them with load_lm(...).model.save_pretrained and "
            "make the store with that"
        )
    if adapter is None:
        return where, checkpoint
    if checkpoint:
        refuse_other_checkpoint(where, checkpoint)
    merged = str(merge(adapter, into))
    return merged, str(checkpoint_digest(merged))


def merge(adapter: Adapter, into: Path) -> Path:
    """Return the merged directory below `into`, named by the adapter's digest. Write it if it does not exist.

    Raises AdapterError if the base is missing, is another model, or is not in safetensors.
    """
    base = find_directory(resolve(adapter.base.name))
    if base is None:
        raise AdapterError(f"{adapter.directory}: its base {adapter.base.name} is not here; download it first")
    adapter.check_base(checkpoint_digest(str(base)))
    target = into / str(checkpoint_digest(str(adapter.directory)))[:32]
    if target.is_dir():
        return target
    with translate_os_errors(into):
        made = into / f".{target.name}-{os.getpid()}"
        shutil.rmtree(made, ignore_errors=True)
        made.mkdir(parents=True)
        try:
            _write(adapter, base, made)
            made.rename(target)
        except OSError:
            if not target.is_dir():  # another process was faster
                raise
        finally:
            shutil.rmtree(made, ignore_errors=True)
    return target


def _write(adapter: Adapter, base: Path, out: Path) -> None:
    tables = _tables(base)
    for path in _files_with(tables, base):
        _write_weights(adapter, path, tables, out / path.name)
    config = json.loads((base / "config.json").read_text(encoding="utf-8"))
    text = config if "vocab_size" in config else config.get("text_config", config)
    text["vocab_size"] = adapter.vocab_size
    config[SECTION] = adapter.spec.section()
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for path in sorted({path for name in TOKENIZER_FILES for path in adapter.directory.glob(name) if path.is_file()}):
        shutil.copyfile(path, out / path.name)
    for path in base.iterdir():
        if path.is_file() and not (out / path.name).exists():
            (out / path.name).symlink_to(path.resolve())


def _tables(base: Path) -> dict[str, bool]:
    """Return, by name, the tensors with a row for each token id, and whether the rows are the embedding's.

    These are the embedding, and the head if it is separate: its rows are then its own. Raises AdapterError if there are
    other such tensors.
    """
    config = AutoConfig.from_pretrained(base, trust_remote_code=False)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    others = [one for one in model.modules() if isinstance(one, nn.Embedding) and one.weight is not embedding]
    if any(len(one.weight) == len(embedding) for one in others):
        raise AdapterError(f"{base} looks ids up in several tables and cannot be merged; use the embedded engine")
    named = model.named_parameters(remove_duplicate=False)
    return {name: weight is embedding for name, weight in named if weight is embedding or weight is head}


def _files_with(tables: Mapping[str, bool], base: Path) -> Iterator[Path]:
    """Yield files of the base that hold any of these tensors. Raises AdapterError if no file holds the embedding."""
    found = set()
    for path in sorted(base.glob("*.safetensors")):
        with safe_open(path, "pt") as held:
            here = tables.keys() & set(held.keys())
        found |= here
        if here:
            yield path
    if not any(tables[name] for name in found):
        raise AdapterError(
            f"{base}: no safetensors file holds its embedding under the name that transformers gives it; write the "
            "merged model with load_lm(ADAPTER).model.save_pretrained and make the store with that"
        )


def _write_weights(adapter: Adapter, path: Path, tables: Mapping[str, bool], out: Path) -> None:
    """Write a copy of a file of the base whose tables have a row for each of the adapter's ids.

    The embedding gets the adapter's trained rows. It is written in float32, so that these rows are not rounded.
    """
    with safe_open(path, "pt") as held:
        metadata = held.metadata()
        tensors: dict[str, Tensor] = {name: held.get_tensor(name) for name in held.keys()}  # noqa: SIM118 - no dict
    for name in tables.keys() & tensors.keys():
        old = tensors[name]
        grown = torch.zeros(max(adapter.vocab_size, len(old)), old.shape[1], dtype=old.dtype)
        grown[: len(old)] = old
        if tables[name] and (rows := adapter.rows()):
            grown = grown.float()
            grown[list(rows)] = torch.stack(list(rows.values()))
        tensors[name] = grown
    save_file(tensors, out, metadata)


def refuse_other_checkpoint(name: str, expected: str) -> None:
    """Raise ModelMismatchError if a model's files are not those with which a store's blocks were computed."""
    if checkpoint_digest(name) != expected:
        raise ModelMismatchError(
            f"{name}: its weights or config.json are not those that the store's blocks were computed with; serve the "
            "model that the store was made with, or make a new store with this one"
        )
