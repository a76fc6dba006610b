"""A cartridge: a trained KV cache of few tokens that replaces a corpus in the prompt."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ragcache.codecs.container import read_container, write_container
from ragcache.errors import AdapterError, BlockError, ConfigError, StoreError
from ragcache.fusion.layout import NO_ADDITIONS, AddedTokens, Layout
from ragcache.fusion.method import FusionMethod, PrefillOutput, PrefillRequest
from ragcache.kv.block_key import Recipe
from ragcache.models.card import ModelCard
from ragcache.prompt import Part, Prompt, Text

if TYPE_CHECKING:
    from torch import Tensor

    from ragcache.kv.state import State

DIRECTORY = "RAGCACHE_CARTRIDGES"
"""Variable of the environment that names the directory of cartridges: what a client asks for is no path."""
SUFFIX, SECTION, VERSION = ".safetensors", "cartridge", 1


@dataclass(frozen=True, eq=False)
class CartridgeKV:
    """The content of a cartridge's file: KV of the prompt's first tokens, an `Exact` as the caches take it.

    model, fingerprint: name of the model that it was trained with, and the model's fingerprint in block keys
    corpus, digest: absolute path of the corpus's text when it was trained, and the text's SHA-256
    ids:     the tokens whose KV initialised it: `prefix_tokens` of the prompt's beginning, then the corpus's first
    layers:  keys and values of each layer, [num_kv_heads, num_tokens, head_dim], keys rotated to 0, 1, ...
    """

    model: str
    fingerprint: str
    corpus: str
    digest: str
    prefix_tokens: int
    ids: tuple[int, ...]
    layers: Sequence[tuple[Tensor, Tensor]]
    states: Sequence[State] = ()

    @property
    def num_tokens(self) -> int:
        return len(self.ids)

    def copy_layer(self, layer: int, keys: Tensor, values: Tensor) -> None:
        own_keys, own_values = self.layers[layer]
        keys.copy_(own_keys)
        values.copy_(own_values)

    def write(self, path: Path) -> None:
        """Write a safetensors file: keys.0, values.0, ..., and all other fields as JSON in its metadata."""
        tensors = {f"keys.{n}": keys for n, (keys, _) in enumerate(self.layers)}
        tensors |= {f"values.{n}": values for n, (_, values) in enumerate(self.layers)}
        stated: dict[str, Any] = {name: getattr(self, name) for name in ("model", "fingerprint", "corpus", "digest")}
        stated |= {"version": VERSION, "prefix_tokens": self.prefix_tokens, "ids": self.ids}
        write_container(path, tensors, {SECTION: json.dumps(stated)})

    @classmethod
    def read(cls, path: Path) -> CartridgeKV:
        """Read a cartridge's file.

        Raises AdapterError for a file that is missing, damaged, not a cartridge or of a newer version, or whose corpus
        has changed since.
        """
        try:
            held = read_container(path)
            stated = json.loads(held.metadata[SECTION])
            version, stated["ids"] = stated.pop("version"), tuple(stated["ids"])
            if version == VERSION:
                count = len(held.tensors) // 2
                layers = [(held.tensors[f"keys.{n}"], held.tensors[f"values.{n}"]) for n in range(count)]
                found = cls(layers=layers, **stated)
        except (BlockError, StoreError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise AdapterError(f"{path} is missing, damaged or no cartridge ({error}); train it again") from error
        if version != VERSION:
            raise AdapterError(f"{path} has version {version!r}, this ragcache reads {VERSION}; install a newer one")
        if (text := Path(found.corpus)).is_file() and corpus_digest(text) != found.digest:
            raise AdapterError(f"{found.corpus} has changed since {path} was trained on it; train it again")
        return found


def corpus_digest(path: Path) -> str:
    """SHA-256 over the file's bytes."""
    return sha256(path.read_bytes()).hexdigest()


@dataclass(frozen=True)
class Cartridge(FusionMethod):
    """Cartridges (Eyuboglu et al., 2025; section 3).

    A number p of trained keys and values of every layer replace the corpus at the prompt's beginning; only the tokens
    after them run.

    The cartridge replaces the prefix that it was trained with, whose KV initialised its first keys and values.
    `ragcache train --reuse cartridge` makes a cartridge.

    file:     name without .safetensors in the directory of RAGCACHE_CARTRIDGES
    passages: whether passages are searched for and read after it, as text; False: it replaces them
    """

    file: str = "cartridge"
    passages: bool = False

    name: ClassVar[str] = "cartridge"
    paper: ClassVar[str] = "Cartridges (arXiv 2506.06266)"
    summary: ClassVar[str] = "reads a trained KV cache of few tokens in place of a whole corpus"
    needs_training: ClassVar[bool] = True
    reuses_blocks: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not isinstance(self.file, str) or not re.fullmatch(r"\w[\w.-]*", self.file):
            raise ConfigError(f"file is {self.file!r}; give the name of a cartridge in {DIRECTORY}, no path")
        if not isinstance(self.passages, bool):
            raise ConfigError(f"passages is {self.passages!r}; give true or false")

    @property
    def takes_passages(self) -> bool:  # type: ignore[override]
        return self.passages

    @property
    def keeps_context(self) -> bool:  # type: ignore[override]
        return self.passages

    @cached_property
    def kv(self) -> CartridgeKV:
        """Return the KV. Raises ConfigError if no directory is named, AdapterError as `CartridgeKV.read` does."""
        directory = os.environ.get(DIRECTORY)
        if not directory:
            raise ConfigError(
                f"method 'cartridge' reads what `ragcache train --reuse cartridge` makes; name its place in {DIRECTORY}"
            )
        return CartridgeKV.read(Path(directory) / (self.file + SUFFIX))

    def additions(self, lm: ModelCard) -> AddedTokens:
        """None. Raises AdapterError where the cartridge belongs to another model."""
        if self.kv.fingerprint != lm.fingerprint:
            raise AdapterError(
                f"cartridge {self.file!r} was trained with {self.kv.model} ({self.kv.fingerprint[:12]}), and this is "
                f"{lm.name} ({lm.fingerprint[:12]}): other weights, another tokenizer or dtype; open that model, or "
                "train a cartridge for this one"
            )
        return NO_ADDITIONS

    def check(self, lm: ModelCard, prompt: Prompt) -> None:
        self.additions(lm)
        if self.passages:
            super().check(lm, prompt)

    def layout(self, lm: ModelCard, parts: Sequence[Part], recipe: Recipe) -> Layout:
        read = [part for part in parts if isinstance(part, Text) or (self.takes_passages and part.chunk_ids)]
        texts = list(takewhile(lambda part: isinstance(part, Text), read))
        first = tuple(id for part in texts if isinstance(part, Text) for id in part.ids)
        return super().layout(lm, (Text(self._standing_in(lm, first)), *read[len(texts) :]), recipe)

    def prefix_ids(self, lm: ModelCard, prompt: Prompt) -> list[int]:
        return list(self._standing_in(lm, tuple(prompt.prefix_ids) or self.kv.ids))

    def _standing_in(self, lm: ModelCard, ids: tuple[int, ...]) -> tuple[int, ...]:
        """Replace the beginning of a text by the cartridge's tokens. Raises ConfigError for another beginning."""
        self.additions(lm)
        for begun in (self.kv.ids, self.kv.ids[: self.kv.prefix_tokens]):  # a conversation may hold it already
            if ids[: len(begun)] == begun:
                return self.kv.ids + ids[len(begun) :]
        raise ConfigError(
            f"cartridge {self.file!r} was trained behind another system prompt or chat template than this prompt's; "
            "ask with the one that it was trained with (`ragcache train --system`)"
        )

    def prefill(self, request: PrefillRequest) -> PrefillOutput:
        request = replace(request, exact=self.kv)
        return request.run(request.new_cache())
