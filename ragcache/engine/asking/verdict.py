"""Which methods are safe for a model: what `ragcache check` found, kept beside the store and keyed by fingerprint."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ragcache.codecs.atomic import atomic_write, write_all
from ragcache.errors import ConfigError, RagCacheError
from ragcache.fusion import get_method
from ragcache.fusion.base import FusionMethod
from ragcache.kv.identity import Recipe
from ragcache.models.card import ModelCard

log = logging.getLogger(__name__)
AUTO, FULL = "auto", "full"
FILE = "verdicts.json"
VERSION = 1


@dataclass(frozen=True)
class MethodVerdict:
    """One method with its options.

    recipe:  name of the recipe that its blocks were encoded under
    safe:    whether it stayed inside every threshold; reason: which one it did not, or why it could not run
    computed_share: tokens run for a question / tokens of its prompt, mean over layers: what "cheapest" goes by
    figures: what was measured, by name
    """

    name: str
    options: Mapping[str, Any]
    recipe: str
    safe: bool
    reason: str = ""
    computed_share: float | None = None
    figures: Mapping[str, float] = field(default_factory=dict)

    def method(self) -> FusionMethod:
        return get_method(self.name, **self.options)

    def is_about(self, method: FusionMethod) -> bool:
        """Whether this was measured with the same method and the same options."""
        try:
            return self.method() == method
        except RagCacheError:
            return False  # written by another version, whose options are not these


@dataclass(frozen=True)
class Verdict:
    """Findings of a check for one model.

    source, questions: what was asked, and how many
    thresholds: that a method had to stay inside
    neighbours: passages that each one was read behind, as the store has it
    """

    fingerprint: str
    model: str
    source: str
    questions: int
    thresholds: Mapping[str, float]
    methods: Sequence[MethodVerdict]
    neighbours: int = 0

    def best(self, recipe: str | None = None) -> MethodVerdict | None:
        """The safe method that computes least, of like ones the nearest to full prefill; None when none is safe.

        recipe: only methods that were checked under this one
        """
        safe = [m for m in self.methods if m.safe and m.name != FULL and recipe in (None, m.recipe)]
        return min(safe, key=_cost, default=None)

    def of(self, method: FusionMethod) -> MethodVerdict | None:
        """The verdict on this method with these options."""
        return next((found for found in self.methods if found.is_about(method)), None)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def _cost(found: MethodVerdict) -> tuple[float, float]:
    return round(found.computed_share or 0.0, 2), found.figures.get("kl_answer", 0.0)


def save_verdict(root: Path, verdict: Verdict) -> Path:
    """Keep the verdict in a store's directory, in place of an older one about the same model.

    Raises StoreReadOnlyError, StoreFullError.
    """
    path = root / FILE
    kept = {**_read(path), verdict.fingerprint: verdict.to_json()}
    with atomic_write(path) as file:
        write_all(file, json.dumps({"version": VERSION, "verdicts": kept}, indent=2).encode() + b"\n")
    return path


def load_verdict(root: Path, fingerprint: str) -> Verdict | None:
    """The verdict on this model; None when it was not checked, or the file cannot be read (with a warning)."""
    found = _read(root / FILE).get(fingerprint)
    if found is None:
        return None
    try:
        return Verdict(**{**found, "methods": tuple(MethodVerdict(**method) for method in found["methods"])})
    except (TypeError, KeyError) as error:
        log.warning("%s: the verdict on this model cannot be read (%s); run `ragcache check` again", root / FILE, error)
        return None


def choose_safe(
    root: Path, fingerprint: str, recipe: str | None = None, neighbours: int = 0
) -> tuple[FusionMethod, str | None]:
    """The method of `method="auto"` and the recipe that it was checked under.

    The cheapest that passed; full prefill, with a warning, where none did or nothing was checked over blocks that were
    read behind so many neighbours.
    """
    verdict = load_verdict(root, fingerprint)
    if verdict is not None and verdict.neighbours != neighbours:
        log.warning(
            "%s: this model was checked over passages read behind %d others each, and the store's are read behind %d; "
            "reading whole prompts. Run `ragcache check --store`",
            root,
            verdict.neighbours,
            neighbours,
        )
        return get_method(FULL), None
    if verdict is None:
        log.warning("%s: this model was not checked; reading whole prompts. Run `ragcache check --store`", root)
        return get_method(FULL), None
    best = verdict.best(recipe)
    if best is None:
        log.warning("%s: no method passed the check of this model; reading whole prompts", root)
        return get_method(FULL), None
    return best.method(), best.recipe


def warn_if_unsafe(root: Path, fingerprint: str, method: FusionMethod, neighbours: int = 0) -> None:
    """A warning when the check of this model failed this method."""
    verdict = load_verdict(root, fingerprint)
    found = None if verdict is None or verdict.neighbours != neighbours else verdict.of(method)
    if found is not None and not found.safe:
        log.warning(
            "method %r failed the check of this model: %s; choose another one, or method='auto'",
            method.name,
            found.reason,
        )


def choose_method(
    root: Path,
    lm: ModelCard,
    method: str | FusionMethod | None,
    options: Mapping[str, Any],
    recipe: str | Recipe | None,
    neighbours: int,
) -> tuple[FusionMethod, str | Recipe | None]:
    """The method asked for, or the one that the model was trained for, with a warning where it failed the check; and
    the recipe. "auto" takes no options, and brings a recipe where none is asked for.

    neighbours: passages that each of the store's is read behind

    Raises what `refuse_unchecked` does.
    """
    if method == AUTO:
        refuse_unchecked(method, recipe)
        asked = None if recipe is None else Recipe.of(recipe).name
        safe, checked = choose_safe(root, lm.fingerprint, asked, neighbours)
        return safe, recipe if recipe is not None else checked
    chosen = get_method(lm.default_method if method is None else method, **options)
    warn_if_unsafe(root, lm.fingerprint, chosen, neighbours)
    return chosen, recipe


def refuse_unchecked(method: str | FusionMethod | None, recipe: str | Recipe | None) -> None:
    """Raises ConfigError for "auto" over blocks of another kind than those that the check read."""
    if method == AUTO and isinstance(recipe, Recipe) and recipe.kept < 1:
        raise ConfigError(
            f'method="auto" stands for what `ragcache check` found over whole KV, and this store\'s blocks hold '
            f"{recipe.kept:g} of it; name a method, such as reposition"
        )


def _read(path: Path) -> dict[str, Any]:
    """Verdicts by fingerprint; none, with a warning, where the file is damaged or of a newer version."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        log.warning("%s: cannot be read (%s); run `ragcache check` again", path, error)
        return {}
    if not isinstance(value, dict) or value.get("version") != VERSION or not isinstance(value.get("verdicts"), dict):
        log.warning("%s: not of this version; run `ragcache check` again", path)
        return {}
    return dict(value["verdicts"])
