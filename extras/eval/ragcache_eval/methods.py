"""Fusion methods as the command line writes them: "cacheblend:ratio=0.15", "fast=reposition:recipe=prefix"."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ragcache.cli.flags import json_or_text
from ragcache.engine.contract import EmbeddedModel
from ragcache.errors import ConfigError, RagCacheError
from ragcache.fusion import METHODS, get_method
from ragcache.fusion.fuse import block_recipe
from ragcache.fusion.method import FusionMethod
from ragcache.kv.block_key import PRIMER, Recipe
from ragcache.models.card import ModelCard
from ragcache.models.primer import PRIMERS
from ragcache.prompt import Prompt
from ragcache_eval.settings import split_settings

FULL = "full"
COMMA = re.compile(r",(?![^\[]*\])")
"""A comma between methods. A comma within brackets, as in "prophet:layers=[4,9]", is part of an option."""


@dataclass(frozen=True)
class MethodSpec:
    """A method with its options.

    label:   its name in tables
    options: of the method, as given
    recipe:  name of the recipe that its blocks are encoded under; None for the method's own choice
    kept:    share of its blocks' KV that the recipe keeps; 1: all
    neighbours: number of the passages named by the questions after which each passage is encoded; 0: none
    primer:  for recipe "primer": a shipped primer's name, a text, or a store's ids; "": the default primer
    """

    label: str
    name: str
    options: tuple[tuple[str, Any], ...] = ()
    recipe: str | None = None
    kept: float = 1.0
    neighbours: int = 0
    primer: str | tuple[int, ...] = ""

    @classmethod
    def parse(cls, text: str) -> MethodSpec:
        """Read "[LABEL=]NAME[:option=value...]".

        Beside its own options, every method takes a `recipe` that its blocks can have. Methods that reuse blocks take
        `neighbours`, and those that can read blocks without part of their KV take `kept`. Raises ConfigError for an
        option that the method does not take, and as `get_method` does.
        """
        head, _, tail = text.strip().partition(":")
        label, equals, name = head.rpartition("=")
        settings = split_settings(tail, ":")
        own = ("recipe", "kept", "neighbours", "primer")
        recipe, kept, near, primer = (settings.pop(key, None) for key in own)
        options = tuple((key, json_or_text(one)) for key, one in settings.items())
        spec = cls(
            label or text.strip(),
            name,
            options,
            recipe,
            1.0 if kept is None else Recipe(kept=json_or_text(kept)).kept,
            0 if near is None else Recipe(neighbours=json_or_text(near)).neighbours,
            primer or "",
        )
        if equals and not label:
            raise ConfigError(f"{text!r} has no label before the =; write LABEL=METHOD")
        spec._check_recipe(spec.method())
        return spec

    def method(self) -> FusionMethod:
        """Return the method. Raises ConfigError for an unknown name or option, or an option out of range."""
        return get_method(self.name, **dict(self.options))

    @property
    def key(self) -> str:
        """Return the method with its options in a canonical form, independent of spelling and label."""
        options = dict(sorted(self.options))
        less = "" if self.kept == 1 else f"*{self.kept:g}"
        less += f"<{self.neighbours}" if self.neighbours else ""
        less += f"^{self.primer if isinstance(self.primer, str) else 'store'}" if self.primer else ""
        return f"{self.name}{json.dumps(options, sort_keys=True) if options else ''}@{self.recipe or ''}{less}"

    @property
    def is_reference(self) -> bool:
        """Return whether this is full prefill, which all others are compared with."""
        return self.name == FULL

    def _check_recipe(self, method: FusionMethod) -> None:
        if self.recipe is not None and self.recipe not in method.recipes:
            raise ConfigError(f"method {self.name!r} takes recipe {' or '.join(method.recipes)}, not {self.recipe!r}")
        if self.primer and self.recipe != PRIMER:
            raise ConfigError(f"method {self.name!r}: primer={self.primer} goes with recipe={PRIMER}; give both")
        if self.kept < 1 and not (method.reuses_blocks and method.takes_sparse):
            raise ConfigError(
                f"method {self.name!r} needs blocks that hold all of their KV; leave kept={self.kept:g} out"
            )
        if self.neighbours and not method.reuses_blocks:
            raise ConfigError(f"method {self.name!r} reads no blocks; leave neighbours={self.neighbours} out")


def parse_methods(texts: Sequence[str]) -> list[MethodSpec]:
    """Parse specs from texts, separated by commas; `full` always comes first.

    Raises ConfigError for two specs with the same label.
    """
    parts = [part for text in texts for part in COMMA.split(text) if part.strip()]
    specs = [MethodSpec.parse(part) for part in parts]
    if not any(spec.is_reference for spec in specs):
        specs = [MethodSpec(FULL, FULL), *specs]
    labels = [spec.label for spec in specs]
    twice = next((label for label in labels if labels.count(label) > 1), None)
    if twice is not None:
        raise ConfigError(f"two methods are called {twice!r}; give one a label: LABEL=METHOD:option=value")
    if len({spec.key for spec in specs}) < len(specs):
        raise ConfigError("one method is asked for twice with the same options; leave one out")
    return sorted(specs, key=lambda spec: not spec.is_reference)


def shipped_primers() -> list[MethodSpec]:
    """Return `reposition` over blocks encoded after each primer that ships."""
    return [MethodSpec.parse(f"reposition:recipe={PRIMER}:primer={name}") for name in PRIMERS]


def all_methods() -> list[MethodSpec]:
    """Return every method with its default options; `full` first."""
    return sorted((MethodSpec(name, name) for name in METHODS), key=lambda spec: spec.name != FULL)


def default_methods(lm: ModelCard) -> list[MethodSpec]:
    """Return every method that this model can use unchanged, with its default options; `full` first."""
    return usable_methods(all_methods(), lm)


def usable_methods(specs: Sequence[MethodSpec], lm: ModelCard) -> list[MethodSpec]:
    """Return the specs that this model can use unchanged."""
    return [spec for spec in specs if why_not(spec, lm) is None]


def why_not(spec: MethodSpec, lm: ModelCard) -> str | None:
    """Return why this model cannot use the method unchanged, such as missing training or a missing option.

    Returns None if it can.
    """
    try:
        method = spec.method()
        method.check(lm, Prompt([], [[0], [0]], [0]))
        block_recipe(lm, method, spec.recipe)
        if isinstance(lm, EmbeddedModel):
            lm.check_method(method)
    except RagCacheError as error:
        return str(error)
    return None
