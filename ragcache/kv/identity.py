"""Names that depend on content alone: recipes and block keys.

A block key is a SHA-256 over everything that the bytes of a block depend on, so that a block made under another
model, recipe or prefix has another name and can never be served by mistake (law 8). `hash()` is not used: it differs
between processes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from ragcache.errors import ConfigError

RECIPE_NAMES = ("isolated", "prefix")


@dataclass(frozen=True)
class Recipe:
    """How a block is encoded.

    name: "isolated" (the chunk alone, from position 0) or "prefix" (behind the shared prefix, which it attends to)
    bos:  "isolated" only: encode behind a lone BOS token whose own KV is dropped, so that the chunk's first tokens do
          not become attention sinks. Needs a model with a BOS token.
    markers: ids read in front of the chunk and behind it; their KV is part of the block (TurboRAG)
    """

    name: str = "isolated"
    bos: bool = False
    markers: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if self.name not in RECIPE_NAMES:
            raise ConfigError(f"recipe {self.name!r} is unknown; choose one of {', '.join(RECIPE_NAMES)}")
        if self.bos and self.name != "isolated":
            raise ConfigError(
                "recipe bos=True goes with 'isolated': behind a prefix the BOS is the prefix's first token"
            )

    @classmethod
    def of(cls, recipe: str | Recipe) -> Recipe:
        return recipe if isinstance(recipe, Recipe) else cls(recipe)

    @property
    def sees_prefix(self) -> bool:
        return self.name == "prefix"

    def __str__(self) -> str:
        """Name used in errors: "isolated", "isolated with markers 5 and 6"."""
        more = [f"markers {self.markers[0]} and {self.markers[1]}"] if self.markers else []
        more += ["a BOS of its own"] if self.bos else []
        return f"{self.name!r}" + (f" with {' and '.join(more)}" if more else "")

    def marked(self, chunk_ids: Sequence[int]) -> list[int]:
        """The ids whose KV a chunk's block holds."""
        return list(chunk_ids) if self.markers is None else [self.markers[0], *chunk_ids, self.markers[1]]


def digest(value: object) -> str:
    """SHA-256, in hex, of a JSON value in canonical form."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def block_key(
    fingerprint: str, recipe: Recipe, prefix_ids: Sequence[int], chunk_ids: Sequence[int], tenant: str = ""
) -> str:
    """The 64 hex digits that name a block.

    prefix_ids count only where the recipe sees them: an isolated block serves every prefix. tenant salts the key, so
    that one tenant's blocks are never hits for another.
    """
    return digest(
        {
            "fingerprint": fingerprint,
            # What a recipe leaves out is not in its name: blocks keep their keys when recipes learn something new.
            "recipe": {name: value for name, value in asdict(recipe).items() if value is not None},
            "prefix": list(prefix_ids) if recipe.sees_prefix else [],
            "chunk": list(chunk_ids),
            "tenant": tenant,
        }
    )
