"""The shape of a model's KV, without its weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from transformers import AutoConfig

from ragcache.codecs.sizes import example_block
from ragcache.errors import ConfigError, ModelNotFoundError, check_least
from ragcache.kv.block import KVBlock
from ragcache.models.loading import DTYPES, resolve
from ragcache.models.support import refuse_by_config


@dataclass(frozen=True)
class KVShape:
    """Keys and values of one token: [num_layers, num_kv_heads, head_dim] each. Raises ConfigError naming the field."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        for name, value in (("layers", self.num_layers), ("kv-heads", self.num_kv_heads), ("head-dim", self.head_dim)):
            check_least(f"--{name}", value, 1)
        if self.dtype not in DTYPES:
            raise ConfigError(f"--dtype {self.dtype!r} is unknown; choose one of auto, {', '.join(DTYPES)}")

    @property
    def bytes_per_token(self) -> int:
        """2 (keys and values) * num_layers * num_kv_heads * head_dim * bytes of a number."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * DTYPES[self.dtype].itemsize

    def block(self, num_tokens: int) -> KVBlock:
        """A block of this shape; see `example_block`."""
        size = (self.num_layers, self.num_kv_heads, num_tokens, self.head_dim)
        return example_block(size, size, DTYPES[self.dtype])


def shape_of(model: str | Path, dtype: str = "auto") -> KVShape:
    """The shape that a model's config.json states; the weights need not be there.

    model: bundled name, directory with a config.json, or hub id
    dtype: "auto" is the configuration's own, float32 where it names none

    Raises ModelNotFoundError, UnsupportedModelError, ConfigError.
    """
    where = Path(resolve(model))
    if where.exists() and not (where / "config.json").is_file():
        raise ModelNotFoundError(f"--model {model}: there is no config.json in it")
    try:
        config = AutoConfig.from_pretrained(str(where))
    except (OSError, ValueError, KeyError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ModelNotFoundError(f"--model {model}: no configuration can be read ({reason})") from error
    refuse_by_config(config, str(model))
    heads = getattr(config, "num_attention_heads", None)
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    layers, hidden = getattr(config, "num_hidden_layers", None), getattr(config, "hidden_size", None)
    head_dim = getattr(config, "head_dim", None) or (hidden // heads if hidden and heads else None)
    if not layers or not kv_heads or not head_dim:
        raise ConfigError(f"--model {model}: its config.json does not state its shape; give --layers, --kv-heads, ...")
    own = str(getattr(config, "dtype", None) or "float32").removeprefix("torch.")
    return KVShape(int(layers), int(kv_heads), int(head_dim), own if dtype == "auto" else dtype)
