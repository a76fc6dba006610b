"""The bundled primers: neutral text that passages are read after and that is left out afterwards.

A passage that is read alone has nothing before it: its first tokens become attention sinks, and the rest is read
as the beginning of a text. After a primer it is read as the middle of a text, as it will be used in a prompt. The
primer's own KV is computed once per store and dropped. It contains nothing that a question could ask for: no name,
number or date.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ragcache.errors import ConfigError
from ragcache.kv.block_key import PRIMER
from ragcache.prompt import encode_text

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

_PARTS = (
    "Soil\n"
    "Soil forms where rock weathers and living things leave their remains. Water carries clay and salts "
    "downwards, worms and roots mix the layers, and frost breaks stones apart. Sandy soils dry quickly and warm "
    "early in spring; heavy ones keep water longer, but are hard to plough.\n",
    "Markets\n"
    "A market needs a square, a day and a road that leads there. Traders put up their stalls before it is light, "
    "and those who come first find the best of the fruit. Towards noon the prices fall, since nobody wants to "
    "carry home what could be sold. When it rains, the stalls move closer together under the roof of the hall.\n",
    "Letters\n"
    "Before there were wires, a letter was as fast as the horse that carried it. At each inn the rider changed "
    "horses, and the bag went on through the night. Along the coast it was given to the captain of a ship, who "
    "kept it dry with his charts. Whoever waited for an answer learned to wait for weeks.\n"
    "Rivers\n"
    "A river is narrow and quick where it begins, and slow and wide where it ends. On its way it takes sand from "
    "one bank and lays it down at the other, so that its bends wander through the valley. Trees along the water "
    "hold the ground with their roots and give shade to the fish.\n",
)
PRIMERS = {"64": _PARTS[0], "128": "".join(_PARTS[:2]), "256": "".join(_PARTS)}
"""By name, which is roughly the number of tokens."""
DEFAULT_PRIMER = "128"


def text_ids(primer: str, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the ids of a bundled primer or of a text; an empty tuple for a text without any character."""
    text = PRIMERS.get(primer, primer).strip()
    return tuple(encode_text(tokenizer, f"{text}\n")) if text else ()


def check_primer(ids: tuple[int, ...], tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ConfigError if a primer that was given as ids holds control tokens.

    After such a token a passage would be read as another part of the chat template.
    """
    control = sorted(set(ids) & set(tokenizer.all_special_ids))
    if control:
        raise ConfigError(
            f"the primer holds the control token {tokenizer.convert_ids_to_tokens(control[0])!r}; leave it out, or "
            "give the primer as a text"
        )


def read_primer(named: str) -> str | tuple[int, ...]:
    """Return a bundled primer's name unchanged, else the text of the file of that name; () for an empty file.

    Raises ConfigError for a file that cannot be read or is not text.
    """
    if named in PRIMERS:
        return named
    try:
        text = Path(named).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--primer {named!r} is none of {', '.join(PRIMERS)} and no text file ({error}); name one of the two"
        ) from error
    return text if text.strip() else ()


def bound_primer(properties: Mapping[str, object]) -> tuple[int, ...]:
    """Return the ids of the primer that a store with these properties was made with; empty if it has none."""
    bound = properties.get(PRIMER)
    return tuple(bound) if isinstance(bound, list) else ()


def visible(ids: tuple[int, ...], config: PreTrainedConfig) -> tuple[int, ...]:
    """Cut a primer to the tokens that a chunk's first token can attend to.

    These are all tokens unless every layer has a sliding window.
    """
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None) or ["sliding_attention"]
    if not window or getattr(config, "use_sliding_window", True) is False or set(types) != {"sliding_attention"}:
        return ids
    return ids[-(int(window) - 1) :] if window > 1 else ()
