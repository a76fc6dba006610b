"""Recipes and block keys: names that depend only on content.

A block key is a SHA-256 over everything that a block's bytes depend on. A block made with another model, recipe or
prefix therefore has another name and can never be served by mistake (law 8). `hash()` is not used: it differs between
processes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from ragcache.errors import ConfigError, check_choice, is_whole

PRIMER = "primer"
RECIPE_NAMES = ("isolated", "prefix", PRIMER)

Sides = tuple[tuple[int, ...], tuple[int, ...]]
"""Ids before a chunk and after it."""
Neighbours = Sequence[Sequence[int]]
"""Ids of the chunks that are read before a chunk, nearest first."""


def sides_of(sides: Sides | None) -> Sides | None:
    """Return both sides as tuples of ids, where a side may be given as a single id; None if there is no id at all.

    Raises ConfigError for other values.
    """
    if sides is None:
        return None
    wrong = ConfigError(f"markers {sides!r} are no pair: give the ids before and behind a chunk, as ((5, 6), (7,))")
    try:
        front, back = ((side,) if isinstance(side, int) else tuple(side) for side in sides)
    except (TypeError, ValueError) as error:
        raise wrong from error
    if not all(is_whole(id) for id in (*front, *back)):
        raise wrong
    return (front, back) if front or back else None


@dataclass(frozen=True)
class Recipe:
    """How a block is encoded.

    name:       "isolated" (the chunk alone, from position 0), "prefix" (after the shared prefix, which it attends to),
                or "primer" (after the shared prefix and the primer, which it attends to and whose KV is dropped)
    primer:     only for "primer": the primer's ids; or its text, or the name of a bundled primer (`models/primer.py`),
                which `ModelCard.recipe` turns into ids. With an empty list of ids the recipe becomes "prefix"
    bos:        only for "isolated": encode after a lone BOS token whose own KV is dropped, so that the chunk's first
                tokens do not become attention sinks. Needs a model with a BOS token
    markers:    any number of ids read before the chunk and after it; their KV is part of the block (TurboRAG's markers)
    neighbours: the largest number of other chunks that are read before each chunk, as a single running text (the
                offline stage of FusionRAG, arXiv 2601.12904); their KV is dropped. The block key contains their ids, in
                order
    kept:       share of its tokens that each KV head of a block holds, above 0; 1: all. The others are dropped once the
                model has read the chunk again (KVzip; see `models/kvzip.py`)
    task:       for `kept` below 1: a task or examples, which the model reads after the chunk instead of repeating it

    Raises ConfigError for an unknown name, a value out of range, and fields that do not go together.
    """

    name: str = "isolated"
    bos: bool = False
    markers: Sides | None = None
    neighbours: int = 0
    kept: float = 1.0
    task: str = ""
    primer: str | tuple[int, ...] = ""

    def __post_init__(self) -> None:
        self._set_primer()
        object.__setattr__(self, "markers", sides_of(self.markers))
        if not is_whole(self.neighbours) or self.neighbours < 0:
            raise ConfigError(f"recipe neighbours={self.neighbours!r} is no number of chunks; choose 0 or more")
        check_choice("recipe", self.name, RECIPE_NAMES)
        if self.bos and self.name != "isolated":
            raise ConfigError(
                "recipe bos=True goes with 'isolated': behind a prefix the BOS is the prefix's first token"
            )
        if isinstance(self.kept, bool) or not isinstance(self.kept, int | float) or not 0 < self.kept <= 1:
            raise ConfigError(
                f"recipe kept={self.kept!r} is no share of a passage's KV; give a number above 0, and at most 1 for all"
            )
        if self.task and self.kept == 1:
            raise ConfigError("recipe task=... says which KV is dropped, and none is; give kept below 1")
        if self.neighbours and self.kept < 1:
            raise ConfigError("recipe neighbours and kept below 1 do not go together; choose one of them")

    def _set_primer(self) -> None:
        """Store the primer as text or as a tuple of ids; without any id the recipe becomes "prefix"."""
        if not isinstance(self.primer, str):
            if not isinstance(self.primer, Sequence) or not all(map(is_whole, self.primer)):
                raise ConfigError(f"primer {self.primer!r} is no text and no list of token ids; give one of the two")
            if not self.primer and self.name == PRIMER:
                object.__setattr__(self, "name", "prefix")
            object.__setattr__(self, "primer", tuple(self.primer) or "")
        if self.primer and self.name != PRIMER:
            raise ConfigError(f"recipe {self.name!r} reads no primer; use recipe {PRIMER!r}, or leave it out")

    @classmethod
    def of(cls, recipe: str | Recipe) -> Recipe:
        return recipe if isinstance(recipe, Recipe) else cls(recipe)

    @property
    def primer_ids(self) -> tuple[int, ...]:
        """Return the ids read before every chunk, after the prefix. Raises ConfigError if the primer is still text."""
        if self.name != PRIMER:
            return ()
        if isinstance(self.primer, str):
            raise ConfigError("the primer of this recipe is a text; `ModelCard.recipe` turns it into a model's ids")
        return self.primer

    @property
    def sees_prefix(self) -> bool:
        """Return whether a chunk is read after the shared prefix."""
        return self.name != "isolated"

    @property
    def needs_prefix(self) -> bool:
        """Return whether a block may only follow the prefix that it was read after.

        A block read after a primer is an approximation anyway, and serves every prefix.
        """
        return self.name == "prefix"

    @property
    def joins_states(self) -> bool:
        """Return whether recurrent layers' states can be joined over blocks of this recipe.

        Their maps then cover exactly the block's own tokens: none was dropped, and none read before them is included.
        """
        return self.is_dense and not self.bos and not self.neighbours

    @property
    def is_dense(self) -> bool:
        """Return whether blocks hold every token in every head."""
        return self.kept == 1

    @property
    def front(self) -> tuple[int, ...]:
        """Return the markers before every chunk."""
        return self.markers[0] if self.markers else ()

    @property
    def back(self) -> tuple[int, ...]:
        """Return the markers after every chunk."""
        return self.markers[1] if self.markers else ()

    def __str__(self) -> str:
        """Return the name that errors use: "isolated", "isolated with markers 5 and 6"."""
        more = [f"markers {_shown(self.front)} and {_shown(self.back)}"] if self.markers else []
        more += ["a BOS of its own"] if self.bos else []
        more += [f"up to {self.neighbours} neighbours"] if self.neighbours else []
        more += [f"{len(self.primer)} tokens"] if isinstance(self.primer, tuple) else []
        task = f" for task {self.task!r}" if self.task else ""
        more += [f"{self.kept:g} of the KV{task}"] if self.kept < 1 else []
        return f"{self.name!r}" + (f" with {' and '.join(more)}" if more else "")

    def before(self, neighbours: Neighbours) -> list[int]:
        """Return the ids of a chunk's neighbours, each with its markers, in the order in which they are read before it.

        Raises ConfigError for more neighbours than the recipe has, and for neighbours that are not lists of ids.
        """
        if not all(isinstance(ids, Sequence) and all(map(is_whole, ids)) for ids in neighbours):
            raise ConfigError(f"neighbours {neighbours!r} are no chunks; give a list of ids each, as [[5, 6], [7]]")
        if len(neighbours) > self.neighbours:
            raise ConfigError(
                f"{len(neighbours)} neighbours were given for a block of recipe {self}; give {self.neighbours} at "
                f"most, or encode under a recipe with neighbours={len(neighbours)}"
            )
        return [id for ids in neighbours for id in self.marked(ids)]

    def marked(self, chunk_ids: Sequence[int]) -> list[int]:
        """Return the ids that a chunk's block consists of, markers included."""
        return [*self.front, *chunk_ids, *self.back]

    def unmarked(self, block_ids: Sequence[int]) -> list[int]:
        """Return the chunk's own ids. Raises ConfigError for ids that `marked` cannot have returned."""
        chunk = list(block_ids[len(self.front) : len(block_ids) - len(self.back)])
        if self.marked(chunk) != list(block_ids):
            raise ConfigError(f"a block of recipe {self} does not begin and end with its markers")
        return chunk

    def to_json(self) -> dict[str, Any]:
        """Return the recipe as JSON, which is part of its blocks' keys.

        Unused fields are left out, and a single marker on each side is written as a plain id, so that blocks keep their
        keys when recipes get new fields. Raises ConfigError if the primer is still text.
        """
        found: dict[str, Any] = {"name": self.name, "bos": self.bos}
        if self.markers is not None:
            lone = len(self.front) == len(self.back) == 1
            found["markers"] = [*self.front, *self.back] if lone else [list(self.front), list(self.back)]
        if self.neighbours:
            found["neighbours"] = self.neighbours
        if primer := self.primer_ids:
            found["primer"] = list(primer)
        if self.kept < 1:
            found |= {"kept": float(self.kept), **({"task": self.task} if self.task else {})}
        return found

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        """Return the recipe of this JSON. Raises ConfigError if it is not a recipe."""
        name, bos = fields.get("name", "isolated"), bool(fields.get("bos", False))
        added = fields.get("neighbours", 0), fields.get("kept", 1.0), str(fields.get("task", ""))
        return cls(name, bos, fields.get("markers"), *added, tuple(fields.get("primer", ())) or "")


def _shown(ids: Sequence[int]) -> str:
    """Return ids as an error message shows them: "5", "5 to 12"."""
    return f"{ids[0]} to {ids[-1]}" if len(ids) > 1 else "".join(map(str, ids)) or "none"


def digest(value: object) -> str:
    """Return the SHA-256, in hex, of a JSON value in canonical form."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def block_key(
    fingerprint: str,
    recipe: Recipe,
    prefix_ids: Sequence[int],
    chunk_ids: Sequence[int],
    salt: str = "",
    neighbours: Neighbours = (),
) -> str:
    """Return the 64 hex digits that name a block.

    prefix_ids count only if the recipe sees the prefix: an isolated block serves every prefix. salt separates
    keys: blocks under one salt are never found under another. neighbours count by their ids and order; a recipe without
    neighbours leaves them out. Raises ConfigError if the recipe's primer is still text.
    """
    behind = {"neighbours": [list(ids) for ids in neighbours]} if recipe.neighbours else {}
    return digest(
        {
            "fingerprint": fingerprint,
            "recipe": recipe.to_json(),
            "prefix": list(prefix_ids) if recipe.sees_prefix else [],
            "chunk": list(chunk_ids),
            "tenant": salt,
            **behind,
        }
    )
