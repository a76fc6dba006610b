"""A LoRA adapter as peft saves it: a directory for a base model, into whose weights it is merged (Hu et al., 2021).

The fingerprint is that of the merged weights, so blocks of the base are never used for the adapter, or vice versa.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from safetensors import SafetensorError
from transformers import PreTrainedModel

from ragcache.errors import AdapterError, ConfigError

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
            raise _damaged_lora(path.parent, error) from error
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
            raise _damaged_lora(self.directory, error) from error
        return merged.eval().requires_grad_(False)


def _damaged_lora(directory: Path, error: Exception) -> AdapterError:
    reason = str(error).strip().split("\n")[0]
    return AdapterError(f"{directory}: the LoRA adapter is damaged, or of another base ({reason}); get it again")
