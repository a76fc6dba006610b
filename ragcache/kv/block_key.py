"""Names that depend on content alone: recipes and block keys.

A block key is a SHA-256 over everything that the bytes of a block depend on, so that a block made under another
model, recipe or prefix has another name and can never be served by mistake (law 8). `hash()` is not used: it differs
between processes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from ragcache.errors import ConfigError, check_choice, is_whole
from ragcache.kv.anchor_tokens import Anchors

PRIMER = "primer"
RECIPE_NAMES = ("isolated", "prefix", PRIMER)

Sides = tuple[tuple[int, ...], tuple[int, ...]]
"""Ids in front of a chunk and behind it."""
Neighbours = Sequence[Sequence[int]]
"""Ids of the chunks that a chunk is read behind, nearest first."""


def sides_of(given: Sides | None) -> Sides | None:
    """Both sides as tuples of ids, a lone id as one; None where there is no id at all. Raises ConfigError otherwise."""
    if given is None:
        return None
    wrong = ConfigError(f"markers {given!r} are no pair: give the ids before and behind a chunk, as ((5, 6), (7,))")
    try:
        front, back = ((side,) if isinstance(side, int) else tuple(side) for side in given)
    except (TypeError, ValueError) as error:
        raise wrong from error
    if not all(is_whole(id) for id in (*front, *back)):
        raise wrong
    return (front, back) if front or back else None


@dataclass(frozen=True)
class Recipe:
    """How a block is encoded.

    name: "isolated" (the chunk alone, from position 0), "prefix" (behind the shared prefix, which it attends to), or
          "primer" (behind the shared prefix and the primer, which it attends to and whose KV is dropped)
    primer: "primer" only: the primer's ids; or its text, or the name of a shipped one (`models/primer.py`), which
          `ModelCard.recipe` turns into ids. Without any ids the recipe is "prefix"
    bos:  "isolated" only: encode behind a lone BOS token whose own KV is dropped, so that the chunk's first tokens do
          not become attention sinks. Needs a model with a BOS token.
    markers: ids read in front of the chunk and behind it, as many as there are; their KV is part of the block
          (TurboRAG's markers, KV Packet's vectors)
    neighbours: most other chunks that each chunk is read behind, as one running text (the offline stage of FusionRAG,
          arXiv 2601.12904); their KV is dropped. Which ones and in what order, the key says by their ids
    kept: share of its tokens that each KV head of a block holds, above 0; 1: all. The others are dropped once the
          model has read the chunk again (KVzip; see `models/kvzip.py`)
    task: what the model reads behind the chunk instead of repeating it, for kept below 1: a task or examples
    anchors: trained ids behind every segment of the chunk, whose KV alone is kept, and the text tokens of a segment
             (KVLink's compressed caches; see `kv/anchor_tokens.py`)
    """

    name: str = "isolated"
    bos: bool = False
    markers: Sides | None = None
    neighbours: int = 0
    kept: float = 1.0
    task: str = ""
    anchors: Anchors | None = None
    primer: str | tuple[int, ...] = ""

    def __post_init__(self) -> None:
        self._set_primer()
        object.__setattr__(self, "markers", sides_of(self.markers))
        object.__setattr__(self, "anchors", Anchors.of(self.anchors))
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
        others = {"markers": self.markers, "neighbours": self.neighbours, "kept below 1": self.kept < 1}
        for name, other in others.items():
            if self.anchors and other:
                raise ConfigError(f"recipe anchors and {name} do not go together; choose one of them")

    def _set_primer(self) -> None:
        """Keep the primer as text or as a tuple of ids; without any id the recipe is "prefix"."""
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
        """Ids that every chunk is read behind, after the prefix. Raises ConfigError for a primer that is still text."""
        if self.name != PRIMER:
            return ()
        if isinstance(self.primer, str):
            raise ConfigError("the primer of this recipe is a text; `ModelCard.recipe` turns it into a model's ids")
        return self.primer

    @property
    def sees_prefix(self) -> bool:
        """Whether a chunk is read behind the shared prefix."""
        return self.name != "isolated"

    @property
    def needs_prefix(self) -> bool:
        """Whether a block may stand behind that prefix alone. Behind a primer it is an approximation anyway, which
        serves every prefix."""
        return self.name == "prefix"

    @property
    def joins_states(self) -> bool:
        """Whether a block says what its tokens, all of them and no others, do to a recurrent layer's state."""
        return self.is_dense and not self.bos and not self.neighbours

    @property
    def is_dense(self) -> bool:
        """Whether blocks hold every token in every head."""
        return self.kept == 1 and self.anchors is None

    @property
    def share(self) -> float:
        """Tokens that each head of a block holds, for each token of the chunk."""
        return self.kept if self.anchors is None else self.anchors.share

    @property
    def front(self) -> tuple[int, ...]:
        """Ids in front of every chunk."""
        return self.markers[0] if self.markers else ()

    @property
    def back(self) -> tuple[int, ...]:
        """Ids behind every chunk."""
        return self.markers[1] if self.markers else ()

    def __str__(self) -> str:
        """Name used in errors: "isolated", "isolated with markers 5 and 6"."""
        more = [f"markers {_shown(self.front)} and {_shown(self.back)}"] if self.markers else []
        more += ["a BOS of its own"] if self.bos else []
        more += [f"up to {self.neighbours} neighbours"] if self.neighbours else []
        more += [f"{len(self.primer)} tokens"] if isinstance(self.primer, tuple) else []
        task = f" for task {self.task!r}" if self.task else ""
        more += [f"{self.kept:g} of the KV{task}"] if self.kept < 1 else []
        more += [str(self.anchors)] if self.anchors else []
        return f"{self.name!r}" + (f" with {' and '.join(more)}" if more else "")

    def before(self, neighbours: Neighbours) -> list[int]:
        """The ids that a chunk is read behind: its neighbours, each with its markers.

        Raises ConfigError for more neighbours than the recipe has, and for what is no list of ids.
        """
        if not all(isinstance(one, Sequence) and all(map(is_whole, one)) for one in neighbours):
            raise ConfigError(f"neighbours {neighbours!r} are no chunks; give a list of ids each, as [[5, 6], [7]]")
        if len(neighbours) > self.neighbours:
            raise ConfigError(
                f"{len(neighbours)} neighbours were given for a block of recipe {self}; give {self.neighbours} at "
                f"most, or encode under a recipe with neighbours={len(neighbours)}"
            )
        return [id for one in neighbours for id in self.marked(one)]

    def marked(self, chunk_ids: Sequence[int]) -> list[int]:
        """The ids that a chunk's block is made of."""
        return [*self.front, *chunk_ids, *self.back] if self.anchors is None else self.anchors.join(chunk_ids)

    def unmarked(self, block_ids: Sequence[int]) -> list[int]:
        """The chunk's own ids. Raises ConfigError for ids that `marked` does not make."""
        if self.anchors is None:
            chunk = list(block_ids[len(self.front) : len(block_ids) - len(self.back)])
        else:
            chunk = self.anchors.split(block_ids)
        if self.marked(chunk) != list(block_ids):
            raise ConfigError(f"a block of recipe {self} does not begin and end with its markers, or lacks its anchors")
        return chunk

    def to_json(self) -> dict[str, Any]:
        """The recipe as JSON, which names its blocks. Left out is what it does not have, and a lone marker on each side
        is written as one id: blocks keep their keys when recipes learn something new."""
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
        if self.anchors is not None:
            found |= {"anchors": list(self.anchors.ids), "segment": self.anchors.segment}
        return found

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> Self:
        """Raises ConfigError for what is no recipe."""
        name, bos = given.get("name", "isolated"), bool(given.get("bos", False))
        added = given.get("neighbours", 0), given.get("kept", 1.0), str(given.get("task", ""))
        anchors = (given["anchors"], given.get("segment")) if "anchors" in given else None
        return cls(name, bos, given.get("markers"), *added, Anchors.of(anchors), tuple(given.get("primer", ())) or "")


def _shown(ids: Sequence[int]) -> str:
    """Ids in an error message: "5", "5 to 12"."""
    return f"{ids[0]} to {ids[-1]}" if len(ids) > 1 else "".join(map(str, ids)) or "none"


def digest(value: object) -> str:
    """SHA-256, in hex, of a JSON value in canonical form."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def block_key(
    fingerprint: str,
    recipe: Recipe,
    prefix_ids: Sequence[int],
    chunk_ids: Sequence[int],
    tenant: str = "",
    neighbours: Neighbours = (),
) -> str:
    """The 64 hex digits that name a block.

    prefix_ids count only where the recipe sees them: an isolated block serves every prefix. tenant salts the key, so
    that blocks under one salt are never hits under another. neighbours count by their ids and order; a recipe without
    them leaves them out.
    """
    behind = {"neighbours": [list(one) for one in neighbours]} if recipe.neighbours else {}
    return digest(
        {
            "fingerprint": fingerprint,
            "recipe": recipe.to_json(),
            "prefix": list(prefix_ids) if recipe.sees_prefix else [],
            "chunk": list(chunk_ids),
            "tenant": tenant,
            **behind,
        }
    )
