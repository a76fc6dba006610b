"""A LoRA adapter as peft saves it: a directory for a base model (Hu et al., 2021).

Its matrices are merged into the base's weights, or stay beside them and act only where passages are encoded. The
fingerprint covers them either way, so blocks of the base are never used for the adapter, or vice versa.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from transformers import PreTrainedModel

from ragcache.errors import AdapterError, ConfigError
from ragcache.models.attention import encoding

LORA_FILE = "adapter_model.safetensors"
ROOT = "base_model.model."  # begins the names in peft's file
DOWN, UP = ".lora_A.weight", ".lora_B.weight"  # end the names of a layer's matrices there
DELTA = ".token_adapter.trainable_tokens_delta"  # ends the name of the rows in peft's file


@dataclass(frozen=True)
class Lora:
    """A LoRA adapter.

    directory: the adapter's directory
    base:      directory or hub id of the model that it belongs to
    """

    FILE: ClassVar[str] = "adapter_config.json"
    BASE: ClassVar[str] = "base_model_name_or_path"

    directory: Path
    base: str

    @classmethod
    def find(cls, where: str | Path) -> Lora | None:
        """Return the adapter in a directory; None if there is none, or if the directory also holds a whole model.

        Raises AdapterError for an adapter that cannot be read, or is of another kind.
        """
        path = Path(where) / cls.FILE
        if not path.is_file() or (path.parent / "config.json").is_file():
            return None
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            base, kind = found[cls.BASE], found["peft_type"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise damaged_lora(path.parent, error) from error
        if kind != "LORA" or not isinstance(base, str) or not base:
            raise AdapterError(
                f"{path}: a {kind} adapter of {base!r}; only LoRA adapters that name their base are merged"
            )
        return cls(path.parent, base)

    def merge(self, model: PreTrainedModel) -> PreTrainedModel:
        """Return the base with the adapter added to its weights.

        Raises AdapterError for an adapter that does not fit, ConfigError if peft is not installed.
        """
        try:
            from peft import LoraConfig, get_peft_model
        except ImportError as error:
            raise ConfigError("LoRA adapters need peft; install ragcache-kv[train]") from error
        try:
            where = str(self.directory)
            adapted: Any = get_peft_model(model, LoraConfig.from_pretrained(where))
            found = adapted.load_adapter(where, "default")  # PeftModel.from_pretrained would only warn of what follows
            for names, reason in (
                (found.missing_keys, "is not there"),
                # A head that shares the embedding's weights takes its rows from there.
                ([name for name in found.unexpected_keys if not name.endswith(DELTA)], "has no place in the base"),
            ):
                if names:
                    raise ValueError(f"{names[0]} {reason}")
            merged: PreTrainedModel = adapted.merge_and_unload(safe_merge=True)
        except (OSError, ValueError, TypeError, KeyError, RuntimeError, SafetensorError) as error:
            raise damaged_lora(self.directory, error) from error
        return merged.eval().requires_grad_(False)

    def attach(self, model: PreTrainedModel) -> None:
        """Put the matrices beside the base's linear layers, where they act on passages alone (`PassageMatrices`).

        Raises AdapterError for an adapter that is damaged or does not fit.
        """
        _, scale, pairs = read_matrices(self.directory)
        try:
            for name, (down, up) in pairs.items():
                layer: Any = model.get_submodule(name.removeprefix(ROOT))
                PassageMatrices(down, up, scale).add_to(layer, model)
        except (ValueError, AttributeError) as error:
            raise damaged_lora(self.directory, error) from error


def read_matrices(directory: Path) -> tuple[int, float, dict[str, tuple[Tensor, Tensor]]]:
    """Return an adapter's rank, the scale of its products and each layer's matrices, down and up.

    Raises AdapterError for an adapter that is damaged or holds no matrices.
    """
    try:
        stated = json.loads((directory / Lora.FILE).read_text(encoding="utf-8"))
        scale = stated["lora_alpha"] / stated["r"]
        pairs = take_pairs(load_file(directory / LORA_FILE))
        if not pairs:
            raise ValueError("it holds no matrices")
    except (OSError, ValueError, TypeError, KeyError, ArithmeticError, SafetensorError) as error:
        raise damaged_lora(directory, error) from error
    return stated["r"], scale, pairs


def take_pairs(held: dict[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """Remove the two matrices of each layer, down and up, from the tensors of a peft file, and return them by layer.

    Raises KeyError if a layer has only one of them.
    """
    names = [name.removesuffix(DOWN) for name in held if name.endswith(DOWN)]
    pairs = {name: (held.pop(f"{name}{DOWN}"), held.pop(f"{name}{UP}")) for name in names}
    if alone := next((name for name in held if ".lora_" in name), None):
        raise KeyError(alone)
    return pairs


class PassageMatrices(nn.Module):
    """The matrices beside a linear layer, in passes that encode passages; all other passes run the base's weights.

    So questions, answers and prompts that are read as a single text are the base model's own.

    down: [rank, in_features]; up: [out_features, rank]; scale: of their product
    """

    down: Tensor
    up: Tensor

    def __init__(self, down: Tensor, up: Tensor, scale: float) -> None:
        super().__init__()
        self.register_buffer("down", down.float())  # files may be in float8, which PyTorch cannot multiply
        self.register_buffer("up", up.float() * scale)

    def add_to(self, layer: nn.Linear, model: PreTrainedModel) -> None:
        """Let the matrices act on what this layer returns. Raises ValueError if their sizes are not the layer's."""
        sizes = self.down.shape[1], self.up.shape[0]
        if (found := (layer.in_features, layer.out_features)) != sizes:
            raise ValueError(f"a layer has {found} features and its matrices {sizes}")
        self.to(device=model.device, dtype=model.dtype)
        layer.add_module("on_passages", self)
        layer.register_forward_hook(self._act)

    def _act(self, layer: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return output if encoding() is None else output + F.linear(F.linear(args[0], self.down), self.up)


def damaged_lora(directory: Path, error: Exception) -> AdapterError:
    reason = str(error).strip().split("\n")[0]
    return AdapterError(f"{directory}: the LoRA adapter is damaged, or of another base ({reason}); get it again")
