"""Rules for keys of a GGUF file.

A rule takes the file, its configuration and the key's value, and raises RefusalError if the key cannot be honoured.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import PreTrainedConfig

from ragcache.models.gguf_header import Header


class RefusalError(Exception):
    """The reason why a key cannot be honoured."""


Rule = Callable[[Header, PreTrainedConfig, Any], None]


def ignored(header: Header, config: PreTrainedConfig, value: Any) -> None:
    """Accept any value: it changes neither the model's computation nor the end of answers, or another rule reads it."""


def only(*values: Any) -> Rule:
    """Return a rule that accepts these values alone."""

    def rule(header: Header, config: PreTrainedConfig, value: Any) -> None:
        if value not in values:
            raise RefusalError("no model that ragcache reads from GGUF computes this")

    return rule


def sets(*attributes: str, off: Any = None) -> Rule:
    """Return a rule that sets the first of these attributes that the configuration has.

    off: the value that is accepted if the configuration has none of them, since it means that the setting is off
    """

    def rule(header: Header, config: PreTrainedConfig, value: Any) -> None:
        attribute = next((name for name in attributes if hasattr(config, name)), None)
        if attribute is not None:
            setattr(config, attribute, value)
        elif value != off:
            raise RefusalError(f"transformers' {config.model_type} has no such setting")

    return rule


def only_for(*architectures: str) -> Rule:
    """Return a rule that accepts a key only for these architectures, for which transformers reads it."""

    def rule(header: Header, config: PreTrainedConfig, value: Any) -> None:
        if header.architecture not in architectures:
            raise RefusalError(f"{header.architecture} is not read with it")

    return rule


def head_dim(config: PreTrainedConfig) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
