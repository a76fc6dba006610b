"""Chooses the method that reads, and keeps the results of `ragcache check` beside the store, keyed by fingerprint."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ragcache.errors import ConfigError, RagCacheError
from ragcache.files import atomic_write, write_all
from ragcache.fusion import get_method, labelled_name, method_label
from ragcache.fusion.method import FusionMethod
from ragcache.kv.block_key import Recipe
from ragcache.models.card import ModelCard

log = logging.getLogger(__name__)
AUTO, FULL = "auto", "full"
KL = "kl_answer"
"""The figure of a check: KL(full prefill || method) along full prefill's answer, in nats per token."""
# Reasons that answers give for the method: what ran, why, and what to do next. Clients of a server see them, so they
# write DIR for the store's path.
CHECK = "Run `ragcache check --store DIR`"
ASKED = "The request or the store named this method. Nothing to do."
ASKED_UNCHECKED = (
    "The request or the store named this method, and the model was not checked over this store. "
    f"{CHECK} to see how its answers compare with full prefill's."
)
TRAINED = "The model was trained for this method. Nothing to do."
CHEAPEST = "The fastest of the methods that passed `ragcache check` over this store. Nothing to do."
NONE_SAFE = "Read whole: no method passed `ragcache check` over this store. Nothing to do."
NOTHING_TO_REUSE = (
    "Read whole: the prompt holds no passage whose KV could be reused. Add documents to the store, or precompute those "
    "of your own vector store."
)
FULL_RUNS_NO_MORE = "Read whole: full prefill would run no more of this prompt's tokens than reuse. Nothing to do."
READABLE = "reposition, cacheblend or epic"


def by_default(method: FusionMethod) -> str:
    """Return the reason given with answers that an untrained model's default method reads."""
    return (
        f"The model was neither trained for reuse nor checked over this store, so its default reads: "
        f"{method_label(method)}, which {method.summary}. {CHECK} to see which faster method is safe."
    )


def cannot_read_blocks(method: FusionMethod) -> str:
    return (
        f"Read whole: the model was not checked over this store, and {method.name} cannot read its blocks here. "
        f"{CHECK} to see which method can."
    )


def cannot_read_between(method: FusionMethod) -> str:
    return (
        f"Read whole: text stands between the passages, and {method.name} cannot read it there. Put it before or "
        f"behind them, or ask by {READABLE}."
    )


def cannot_keep(method: FusionMethod) -> str:
    return (
        f"Read whole: {method.name} cannot keep the context of earlier turns. Ask by {READABLE}, or without "
        'context="keep".'
    )


FILE = "verdicts.json"
VERSION = 1


@dataclass(frozen=True)
class MethodVerdict:
    """The verdict on a method with its options.

    recipe:  name of the recipe that its blocks were encoded under
    safe:    whether it stayed inside every threshold; reason: which threshold it exceeded, or why it could not run
    computed_share: tokens run for a question / tokens of its prompt, mean over layers: decides which method is cheapest
    figures: measurements, by name
    primer:  the shipped primer that its blocks were encoded after, if it is not the store's; "" otherwise
    """

    name: str
    options: Mapping[str, Any]
    recipe: str
    safe: bool
    reason: str = ""
    computed_share: float | None = None
    figures: Mapping[str, float] = field(default_factory=dict)
    primer: str = ""

    def method(self) -> FusionMethod:
        return get_method(self.name, **self.options)

    def is_about(self, method: FusionMethod) -> bool:
        """Return whether this was measured with the same method and the same options."""
        try:
            return self.method() == method
        except RagCacheError:
            return False  # written by another version with other options


@dataclass(frozen=True)
class Verdict:
    """Findings of a check for a model.

    source, questions: where the questions came from, and how many there were
    thresholds: limits that a method had to stay inside
    neighbours: passages that each passage was encoded after, as the store has it
    primer:    ids of the store's primer, after which each passage was encoded
    """

    fingerprint: str
    model: str
    source: str
    questions: int
    thresholds: Mapping[str, float]
    methods: Sequence[MethodVerdict]
    neighbours: int = 0
    primer: tuple[int, ...] = ()

    def best(
        self, recipe: str | None = None, reads: Callable[[FusionMethod], bool] = lambda _: True
    ) -> MethodVerdict | None:
        """Return the safe method that computes least, or None if none is safe. Ties go to the nearest to full prefill.

        recipe: only methods that were checked under this recipe
        reads:  only methods for which this returns True
        """
        safe = [m for m in self._over_the_store() if m.safe and m.name != FULL and recipe in (None, m.recipe)]
        return min((m for m in safe if reads(m.method())), key=_cost, default=None)

    def of(self, method: FusionMethod) -> MethodVerdict | None:
        """Return the verdict on this method with these options."""
        return next((found for found in self._over_the_store() if found.is_about(method)), None)

    @property
    def best_primer(self) -> tuple[MethodVerdict, MethodVerdict] | None:
        """Return `reposition` over the store's blocks, and over blocks after the shipped primer with the lowest KL.

        Returns None if the check did not try primers, or none has a lower KL than the store's blocks.
        """
        own = self.of(get_method("reposition"))
        tried = [found for found in self.methods if found.primer and KL in found.figures]
        best = min(tried, key=lambda found: found.figures[KL], default=None)
        if own is None or best is None or best.figures[KL] >= own.figures.get(KL, float("inf")):
            return None
        return own, best

    def _over_the_store(self) -> list[MethodVerdict]:
        """Return the findings about the store's own blocks."""
        return [found for found in self.methods if not found.primer]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def _cost(found: MethodVerdict) -> tuple[float, float]:
    return round(found.computed_share or 0.0, 2), found.figures.get(KL, 0.0)


def save_verdict(root: Path, verdict: Verdict) -> Path:
    """Save the verdict in a store's directory, replacing an older verdict on the same model.

    Raises StoreReadOnlyError, StoreFullError.
    """
    path = root / FILE
    verdicts = {**_read(path), verdict.fingerprint: verdict.to_json()}
    with atomic_write(path) as file:
        write_all(file, json.dumps({"version": VERSION, "verdicts": verdicts}, indent=2).encode() + b"\n")
    return path


def load_verdict(root: Path, fingerprint: str) -> Verdict | None:
    """Return the verdict on this model, or None if it was not checked or the file cannot be read (with a warning)."""
    found = _read(root / FILE).get(fingerprint)
    if found is None:
        return None
    try:
        methods = tuple(MethodVerdict(**method) for method in found["methods"])
        return Verdict(**{**found, "methods": methods, "primer": tuple(found.get("primer", ()))})
    except (TypeError, KeyError) as error:
        log.warning("%s: the verdict on this model cannot be read (%s); run `ragcache check` again", root / FILE, error)
        return None


@dataclass(frozen=True)
class StoredBlocks:
    """Properties of a store's blocks that decide which methods can read them.

    root:       the store's directory, which holds verdicts
    recipe:     the recipe that blocks must have; None: the method's own
    neighbours: passages that each passage is encoded after
    is_whole:   whether they hold all tokens in every head, as the blocks of a check do
    reads:      whether the engine can read them by a method
    """

    root: Path
    recipe: str | Recipe | None
    neighbours: int
    is_whole: bool
    reads: Callable[[FusionMethod], bool]

    @property
    def primer_ids(self) -> tuple[int, ...]:
        """Return the ids of the primer that the blocks are encoded after."""
        return self.recipe.primer_ids if isinstance(self.recipe, Recipe) else ()


@dataclass(frozen=True)
class Choice:
    """The method that reads questions, and why.

    recipe:       of the blocks, as requested or as the method was checked; None: the method's own
    is_unchecked: whether neither training nor a check says how the answers compare with full prefill's
    gives_way:    whether `full` takes over prompts that the method cannot read
    """

    method: FusionMethod
    why: str
    recipe: str | Recipe | None = None
    is_unchecked: bool = False
    gives_way: bool = False

    @property
    def name(self) -> str:
        return AUTO if self.is_open else self.method.name

    @property
    def label(self) -> str:
        """Return the method's name in answers."""
        return method_label(self.method)

    @property
    def is_open(self) -> bool:
        """Return whether each question has to decide between the method and `full`."""
        return self.gives_way and self.is_unchecked and self.method.reuses_blocks

    def exactly(self, why: str) -> Choice:
        """Return the choice of `full`."""
        return replace(self, method=get_method(FULL), why=why, gives_way=False)

    def settled(self, full: int, reuse: int) -> Choice:
        """Return the choice for a question: `full` if it would run no more tokens than the method, else the method.

        Only an open choice (`is_open`) may be settled.

        Args:
            full: tokens of the prompt that `full` would run.
            reuse: tokens of the prompt that the method would run.
        """
        return self.exactly(FULL_RUNS_NO_MORE) if full <= reuse else replace(self, gives_way=False)


def choose_method(
    lm: ModelCard, method: str | FusionMethod | None, options: Mapping[str, Any], stored: StoredBlocks
) -> Choice:
    """Return the requested method, named or given by its options alone; for None and "auto", the first of

    1. the method that the model was trained for; under "auto", a verdict of `ragcache check` precedes it;
    2. the cheapest method that passed the check of this model over such blocks, `full` if none did;
    3. the model's default, unless `full` runs no more of a question's tokens than the default.

    Warns of a method that failed the check. Raises ConfigError.
    """
    verdict = _standing(stored, lm.fingerprint)
    if method == AUTO and options:
        raise ConfigError(f'method="auto" takes no options; name the method of {", ".join(options)}', "method_options")
    if method not in (None, AUTO) or options:
        chosen = get_method(lm.default_method if method is None else method, **options)
        _warn_if_unsafe(verdict, chosen)
        is_unchecked = verdict is None and lm.reuse is None
        why = ASKED_UNCHECKED if is_unchecked and chosen.reuses_blocks else ASKED
        return Choice(chosen, why, stored.recipe, is_unchecked=is_unchecked)
    if lm.reuse is not None and (method is None or verdict is None):
        chosen = get_method(lm.default_method)
        _warn_if_unsafe(verdict, chosen)
        return Choice(chosen, TRAINED, stored.recipe)
    return _unchecked(lm, stored) if verdict is None else _checked(verdict, stored)


def _checked(verdict: Verdict, stored: StoredBlocks) -> Choice:
    best = verdict.best(None if stored.recipe is None else Recipe.of(stored.recipe).name, stored.reads)
    if best is None:
        log.warning("%s: no method passed the check of this model; reading whole prompts", stored.root)
        return Choice(get_method(FULL), NONE_SAFE, stored.recipe)
    recipe = best.recipe if stored.recipe is None else stored.recipe
    return Choice(best.method(), CHEAPEST, recipe, gives_way=True)


def _unchecked(lm: ModelCard, stored: StoredBlocks) -> Choice:
    method = get_method(lm.default_method, **lm.default_options)
    # With neighbours, epic is cheaper and nearer to full prefill (docs/methods.md).
    if stored.neighbours and not lm.is_recurrent:
        method = get_method("epic")
    choice = Choice(method, by_default(method), stored.recipe, is_unchecked=True, gives_way=True)
    if stored.reads(choice.method):
        return choice
    return choice.exactly(cannot_read_blocks(choice.method))


def _standing(stored: StoredBlocks, fingerprint: str) -> Verdict | None:
    """Return the verdict on this model over blocks like the store's, or None if there is no such verdict.

    If the model was checked over blocks with other neighbours or another primer, a warning is logged.
    """
    verdict = load_verdict(stored.root, fingerprint) if stored.is_whole else None
    if verdict is None:
        return None
    checked, own = (verdict.neighbours, verdict.primer), (stored.neighbours, stored.primer_ids)
    if checked == own:
        return verdict
    behind = (f"{number} others and a primer of {len(ids)} tokens" for number, ids in (checked, own))
    log.warning(
        "%s: this model was checked over passages read behind %s each, and the store's are read behind %s: that says "
        "nothing of them. Run `ragcache check --store`",
        stored.root,
        *behind,
    )
    return None


def _warn_if_unsafe(verdict: Verdict | None, method: FusionMethod) -> None:
    """Log a warning if the check of this model failed this method."""
    found = None if verdict is None else verdict.of(method)
    if found is not None and not found.safe:
        log.warning(
            "method %r failed the check of this model: %s; choose another one, or method='auto'",
            method.name,
            found.reason,
        )


def warn_if_unchecked(model: str, root: Path, choice: Choice, method: str) -> bool:
    """Warn that answers rest on reused KV if neither training nor a check covers that. Return whether it warned.

    method: label of the method that reads a question with passages
    """
    if not choice.is_unchecked or not get_method(labelled_name(method)).reuses_blocks:
        return False
    log.warning(
        "%s was not trained for reuse, and nobody checked how %r answers over this store: expect worse answers than "
        "full prefill's. Check it with `ragcache check --store %s`, or read exactly with method='full'. This is said "
        "once",
        model,
        method,
        root,
    )
    return True


def _read(path: Path) -> dict[str, Any]:
    """Return verdicts by fingerprint, or {} with a warning if the file is damaged or of a newer version."""
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
