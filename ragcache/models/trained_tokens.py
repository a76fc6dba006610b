"""How a checkpoint was trained for reuse: the section "ragcache" of its config.json.

    {"version": 1, "method": "link", "recipe": "isolated", "link_tokens": 5, "link_slots": 16,
     "first_link_id": 2735, "kv_start_id": 2815, "kv_end_id": 2816}
    {"version": 1, "method": "markers", "recipe": "isolated", "doc_start_id": 2735, "doc_end_id": 2736,
     "positions": "reordered"}
    {"version": 1, "method": "reposition", "recipe": "isolated"}

transformers keeps the section as an attribute of the configuration, so it is part of the model's fingerprint. The last
form is Block-Attention (Ma et al., arXiv 2409.15355), which is KVLink with no link tokens and adds no ids at all.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from ragcache.errors import ConfigError, PromptError, is_whole
from ragcache.kv.block_key import RECIPE_NAMES, Sides

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

SECTION, VERSION = "ragcache", 1
POSITIONS = ("reordered", "composite")
# Fields that go with each method.
_FIELDS: dict[str, tuple[str, ...]] = {
    "link": ("link_tokens", "link_slots", "first_link_id", "kv_start_id", "kv_end_id"),
    "markers": ("doc_start_id", "doc_end_id", "positions"),
    "reposition": (),
}

# Names of the tokens that training adds to a vocabulary; link tokens by slot and place, from 1.
LINK_NAME = "<|link_{}_{}|>"
KV_START, KV_END = "<|kv_start|>", "<|kv_end|>"

# Checkpoints of KVLink's own code have no section; they use these of Llama 3's reserved ids.
LLAMA3_VOCABULARY = 128256
_LLAMA3_FIRST_LINK, _LLAMA3_KV_START, _LLAMA3_KV_END = 128011, 128254, 128255


@dataclass(frozen=True)
class TrainedTokens:
    """The way of reuse that a checkpoint was trained for.

    method:      "link" (KVLink), "markers" (TurboRAG) or "reposition" (Block-Attention)
    recipe:      name of the recipe that its chunks are encoded with
    link_tokens: K, link tokens after each chunk; link_slots: number of chunks that have link tokens
    first_link_id: id of slot 0's first link token; slot n's j-th is first_link_id + K * n + j
    kv_start_id, kv_end_id: ids around the reused part; both or neither
    doc_start_id, doc_end_id: ids around every chunk (markers)
    positions:   "reordered" or "composite" (markers)

    Raises ConfigError naming the field that is missing or out of range.
    """

    method: str
    recipe: str = "isolated"
    link_tokens: int = 0
    link_slots: int = 0
    first_link_id: int | None = None
    kv_start_id: int | None = None
    kv_end_id: int | None = None
    doc_start_id: int | None = None
    doc_end_id: int | None = None
    positions: str | None = None

    def __post_init__(self) -> None:
        if self.method not in _FIELDS:
            raise _bad(f"method {self.method!r} is unknown; it is one of {', '.join(_FIELDS)}")
        if self.recipe not in RECIPE_NAMES:
            raise _bad(f"recipe {self.recipe!r} is unknown; it is one of {', '.join(RECIPE_NAMES)}")
        for name in (*_FIELDS["link"], "doc_start_id", "doc_end_id"):
            value = getattr(self, name)
            if value is not None and (not is_whole(value) or value < 0):
                raise _bad(f"{name} is {value!r}; it is a whole number of at least 0")
        if self.method == "link":
            self._check_link()
        if self.method == "markers" and (self.doc_start_id is None or self.doc_end_id is None):
            raise _bad("method 'markers' needs doc_start_id and doc_end_id")
        if self.method == "markers" and self.positions not in POSITIONS:
            raise _bad(f"positions is {self.positions!r}; it is one of {', '.join(POSITIONS)}")

    def _check_link(self) -> None:
        if self.link_tokens and (self.first_link_id is None or not self.link_slots):
            raise _bad("link_tokens without first_link_id and link_slots; a link checkpoint states all three")
        if (self.kv_start_id is None) != (self.kv_end_id is None):
            raise _bad("kv_start_id and kv_end_id go together; state both or neither")
        ids = [id for own in self.groups.values() for id in own]
        if len(set(ids)) < len(ids):
            raise _bad("kv_start_id, kv_end_id and the link ids overlap; every added token has an id of its own")

    @classmethod
    def of(cls, config: PreTrainedConfig) -> TrainedTokens | None:
        """Read the section of a model's configuration; None for a checkpoint that was not trained for reuse.

        Raises the errors of `read`.
        """
        section = getattr(config, SECTION, None)
        return None if section is None else cls.read(section)

    @classmethod
    def read(cls, section: object) -> TrainedTokens:
        """Parse a section. Raises ConfigError if it cannot be read, or has a newer version."""
        if not isinstance(section, dict) or "method" not in section:
            raise _bad("it is no object with a method in it")
        version = section.get("version")
        if version != VERSION:
            raise _bad(f"it has version {version!r}, this ragcache reads {VERSION}; install a newer ragcache")
        known = {field.name for field in fields(cls)}
        if unknown := sorted(set(section) - known - {"version"}):
            raise _bad(f"it holds {', '.join(unknown)}, which this ragcache does not know")
        return cls(**{name: value for name, value in section.items() if name in known})

    @classmethod
    def llama3(cls, link_tokens: int) -> TrainedTokens:
        """Return the layout of KVLink's own checkpoints trained from Llama 3: K link tokens, over reserved ids."""
        slots = (_LLAMA3_KV_START - _LLAMA3_FIRST_LINK) // link_tokens if link_tokens else 0
        return cls("link", "isolated", link_tokens, slots, _LLAMA3_FIRST_LINK, _LLAMA3_KV_START, _LLAMA3_KV_END)

    @classmethod
    def of_vocabulary(cls, vocabulary: Mapping[str, int]) -> TrainedTokens | None:
        """Return the link tokens that training has added to a vocabulary; None if it has none.

        For files that hold a vocabulary and no section, as GGUF files do. They do not say which recipe the model was
        trained for.
        """
        pattern = re.compile(re.escape(LINK_NAME).replace(r"\{\}", r"(\d+)"))
        places = [(int(found[1]), int(found[2])) for name in vocabulary if (found := pattern.fullmatch(name))]
        if not places or not {KV_START, KV_END} <= vocabulary.keys():
            return None
        slots, tokens = (max(numbers) for numbers in zip(*places, strict=True))
        first = vocabulary[LINK_NAME.format(1, 1)]
        return cls("link", "isolated", tokens, slots, first, vocabulary[KV_START], vocabulary[KV_END])

    def section(self) -> dict[str, Any]:
        """Return the section "ragcache" of config.json."""
        own = {name: getattr(self, name) for name in _FIELDS[self.method]}
        common = {"version": VERSION, "method": self.method, "recipe": self.recipe}
        stated = {name: value for name, value in own.items() if value is not None}
        return {**common, **stated}

    def link_ids(self, slot: int) -> list[int]:
        """Return the K link ids of the chunk at `slot`, counted from 0. Raises PromptError for a slot that has none."""
        if not self.link_tokens or self.first_link_id is None:
            return []
        if not 0 <= slot < self.link_slots:
            raise PromptError(
                f"there are link tokens for {self.link_slots} passages and none for passage {slot + 1}"
                "; use fewer passages"
            )
        first = self.first_link_id + self.link_tokens * slot
        return list(range(first, first + self.link_tokens))

    @property
    def markers(self) -> Sides | None:
        """Return the ids before and after every chunk that the trained method reads with it."""
        if self.doc_start_id is None or self.doc_end_id is None:
            return None
        return (self.doc_start_id,), (self.doc_end_id,)

    @property
    def groups(self) -> dict[str, Sequence[int]]:
        """Return the method's ids, in order, by the name of their group."""
        links = {f"link {slot + 1}": self.link_ids(slot) for slot in range(self.link_slots)}
        alone = {name: getattr(self, f"{name}_id") for name in ("kv_start", "kv_end", "doc_start", "doc_end")}
        single = {name: (id,) for name, id in alone.items() if id is not None}
        return {**links, **single}

    @property
    def roles(self) -> dict[int, tuple[str, int]]:
        """Return, for each of the method's ids, the name of its group and its index in the group."""
        return {id: (name, place) for name, ids in self.groups.items() for place, id in enumerate(ids)}

    @property
    def added_ids(self) -> frozenset[int]:
        """Return all ids that belong to the method: never sampled, never part of a text."""
        return frozenset(self.roles)

    def check(self, vocab_size: int, tokenizer: PreTrainedTokenizerBase | None, name: str) -> None:
        """Raise ConfigError if the model lacks these ids, or the tokenizer does not separate them from text."""
        if outside := sorted(i for i in self.added_ids if i >= vocab_size):
            raise ConfigError(
                f"{name}: config.json's section {SECTION!r} names token id {outside[-1]} and the model has ids 0 to "
                f"{vocab_size - 1}; use the config.json and weights of one training run"
            )
        if tokenizer is None:
            return
        if strange := sorted(self.added_ids - set(tokenizer.added_tokens_decoder)):
            raise ConfigError(
                f"{name} was trained for reuse with token id {strange[0]}, which its tokenizer does not hold as an "
                "added token; use the tokenizer files that were saved with the checkpoint"
            )


def _bad(reason: str) -> ConfigError:
    return ConfigError(f"config.json's section {SECTION!r} cannot be used: {reason}")


def grown(size: int, added: Collection[int]) -> int:
    """Return the rows of a vocabulary of `size` after growing to hold the added ids.

    Vocabularies are padded to multiples of powers of two for fast matrix products, and the result keeps that padding.
    """
    if max(added, default=0) < size:
        return size
    multiple = next((power for power in (128, 64, 32, 16, 8) if size % power == 0), 1)
    return -(-(max(added) + 1) // multiple) * multiple
