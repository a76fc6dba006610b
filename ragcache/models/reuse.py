"""How a checkpoint was trained for reuse: the section "ragcache" of its config.json.

    {"version": 1, "method": "link", "recipe": "isolated", "link_tokens": 5, "link_slots": 16,
     "first_link_id": 2735, "kv_start_id": 2815, "kv_end_id": 2816}
    {"version": 1, "method": "markers", "recipe": "isolated", "doc_start_id": 2735, "doc_end_id": 2736,
     "positions": "reordered"}
    {"version": 1, "method": "reposition", "recipe": "isolated"}

transformers keeps it as an attribute of the configuration, so it is part of the model's fingerprint. The last form is
Block-Attention (Ma et al., arXiv 2409.15355), which is KVLink with no link tokens and adds no ids at all.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from ragcache.errors import ConfigError, PromptError, is_whole
from ragcache.kv.identity import RECIPE_NAMES

SECTION, VERSION = "ragcache", 1
POSITIONS = ("reordered", "composite")
# Fields that go with each method, and of them those that may be left out.
_FIELDS = {
    "link": ("link_tokens", "link_slots", "first_link_id", "kv_start_id", "kv_end_id"),
    "markers": ("doc_start_id", "doc_end_id", "positions"),
    "reposition": (),
}

# Checkpoints of KVLink's own code carry no section; their ids are these of Llama 3's reserved ones.
LLAMA3_VOCABULARY = 128256
_LLAMA3_FIRST_LINK, _LLAMA3_KV_START, _LLAMA3_KV_END = 128011, 128254, 128255


@dataclass(frozen=True)
class ReuseSpec:
    """The way of reuse that a checkpoint was trained for.

    method:      "link" (KVLink), "markers" (TurboRAG) or "reposition" (Block-Attention)
    recipe:      name of the recipe that its chunks are encoded under
    link_tokens: K, link tokens after each chunk; link_slots: chunks that have link tokens of their own
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
        self._check_numbers()
        if self.method == "link":
            self._check_link()
        if self.method == "markers":
            self._check_markers()

    def _check_numbers(self) -> None:
        for name in (*_FIELDS["link"], "doc_start_id", "doc_end_id"):
            value = getattr(self, name)
            if value is not None and (not is_whole(value) or value < 0):
                raise _bad(f"{name} is {value!r}; it is a whole number of at least 0")

    def _check_link(self) -> None:
        if self.link_tokens and (self.first_link_id is None or not self.link_slots):
            raise _bad("link_tokens without first_link_id and link_slots; a link checkpoint states all three")
        if (self.kv_start_id is None) != (self.kv_end_id is None):
            raise _bad("kv_start_id and kv_end_id go together; state both or neither")
        ids = [i for slot in range(self.link_slots) for i in self.link_ids(slot)]
        if {self.kv_start_id, self.kv_end_id} & set(ids) or (ids and self.kv_start_id == self.kv_end_id is not None):
            raise _bad("kv_start_id, kv_end_id and the link ids overlap; every added token has an id of its own")

    def _check_markers(self) -> None:
        if self.doc_start_id is None or self.doc_end_id is None:
            raise _bad("method 'markers' needs doc_start_id and doc_end_id")
        if self.positions not in POSITIONS:
            raise _bad(f"positions is {self.positions!r}; it is one of {', '.join(POSITIONS)}")

    @classmethod
    def of(cls, config: PreTrainedConfig) -> ReuseSpec | None:
        """The section of a model's configuration; None for a checkpoint that was not trained for reuse.

        Raises ConfigError for a section that cannot be read, or of a newer version.
        """
        section = getattr(config, SECTION, None)
        if section is None:
            return None
        if not isinstance(section, dict) or "method" not in section:
            raise _bad("it is no object with a method in it")
        version = section.get("version")
        if version != VERSION:
            raise _bad(f"it has version {version!r}, this ragcache reads {VERSION}; install a newer ragcache")
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(section) - known - {"version"})
        if unknown:
            raise _bad(f"it holds {', '.join(unknown)}, which this ragcache does not know")
        return cls(**{name: value for name, value in section.items() if name in known})

    @classmethod
    def llama3(cls, link_tokens: int) -> ReuseSpec:
        """The layout of checkpoints trained by KVLink's own code from Llama 3: K link tokens, over reserved ids."""
        slots = (_LLAMA3_KV_START - _LLAMA3_FIRST_LINK) // link_tokens if link_tokens else 0
        return cls("link", "isolated", link_tokens, slots, _LLAMA3_FIRST_LINK, _LLAMA3_KV_START, _LLAMA3_KV_END)

    def section(self) -> dict[str, Any]:
        """The section "ragcache" of config.json."""
        own = {name: getattr(self, name) for name in _FIELDS[self.method]}
        common = {"version": VERSION, "method": self.method, "recipe": self.recipe}
        return {**common, **{name: value for name, value in own.items() if value is not None}}

    def link_ids(self, slot: int) -> list[int]:
        """The K link ids of the chunk at `slot`, counted from 0. Raises PromptError for a slot that has none."""
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
    def added_ids(self) -> frozenset[int]:
        """All ids that belong to the method: never sampled, never part of a text."""
        links = (i for slot in range(self.link_slots) for i in self.link_ids(slot))
        around = (self.kv_start_id, self.kv_end_id, self.doc_start_id, self.doc_end_id)
        return frozenset([*links, *(i for i in around if i is not None)])

    def check(self, vocab_size: int, tokenizer: PreTrainedTokenizerBase | None, name: str) -> None:
        """Raises ConfigError when the model has no such ids, or the tokenizer does not set them apart from text."""
        outside = sorted(i for i in self.added_ids if i >= vocab_size)
        if outside:
            raise ConfigError(
                f"{name}: config.json's section {SECTION!r} names token id {outside[-1]} and the model has ids 0 to "
                f"{vocab_size - 1}; use the config.json and weights of one training run"
            )
        if tokenizer is None:
            return
        strange = sorted(self.added_ids - set(tokenizer.added_tokens_decoder))
        if strange:
            raise ConfigError(
                f"{name} was trained for reuse with token id {strange[0]}, which its tokenizer does not hold as an "
                "added token; use the tokenizer files that were saved with the checkpoint"
            )


def _bad(reason: str) -> ConfigError:
    return ConfigError(f"config.json's section {SECTION!r} cannot be used: {reason}")
