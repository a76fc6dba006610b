"""Layers by which `prophet` chooses best on a model and its passages: QCFuse's profiled layers (arXiv 2606.05875)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import fmean

from ragcache.engine.verdict import FULL
from ragcache.errors import ConfigError, check_least
from ragcache_eval.case import Case
from ragcache_eval.journal import Ledger, Score
from ragcache_eval.methods import MethodSpec
from ragcache_eval.runner import Runner

PROFILED = "prophet"


def can_profile(spec: MethodSpec) -> bool:
    """Return whether the method chooses by layers and the spec names none."""
    return spec.name == PROFILED and dict(spec.options).get("layers") is None


class Profile:
    """A search for the layers of a `prophet` spec. Iterate `scores()` to search; `spec` then names the layers found.

    In the first of `count` rounds each layer chooses alone, in later rounds together with the layers already found. A
    round keeps the layer whose answers are nearest to full prefill's (least mean KL along full prefill's answer). How
    QCFuse itself profiles layers is not known.
    """

    def __init__(self, runner: Runner, cases: Sequence[Case], spec: MethodSpec, count: int) -> None:
        """Prepare a search for `count` layers, at most all of the model's.

        Raises ConfigError if the method is not `prophet`, if the spec names layers, or if there are no cases.
        """
        if not can_profile(spec):
            raise ConfigError(f"{spec.label}: layers are profiled for {PROFILED} alone, where none are named")
        if not cases:
            raise ConfigError("layers are profiled on questions, and there are none; give at least one")
        check_least("profile_layers", count, 1)
        self.runner = Runner(runner.lm, runner.form, replace(runner.settings, reference="full"))
        self.cases = list(cases)
        self.count = min(count, runner.lm.num_layers)
        self.spec = spec

    @property
    def num_scores(self) -> int:
        """Return the number of scores that `scores()` yields."""
        tried = sum(self.runner.lm.num_layers - found for found in range(self.count))
        return len(self.cases) * (tried + 2 * self.count)

    def scores(self) -> Iterator[Score]:
        found: tuple[int, ...] = ()
        for _ in range(self.count):
            left = [layer for layer in range(self.runner.lm.num_layers) if layer not in found]
            tried = {self._with((*found, layer)).key: (*found, layer) for layer in left}
            specs = [MethodSpec(FULL, FULL), *(self._with(layers) for layers in tried.values())]
            far: dict[str, list[float]] = {key: [] for key in tried}
            for score in self.runner.run(self.cases, specs, Ledger()):
                if score.method in far and score.kl_answer is not None:
                    far[score.method].append(score.kl_answer)
                yield score
            if not all(far.values()):
                raise ConfigError("no question of the profile could be measured; give questions that fit the model")
            found = tried[min(far, key=lambda key: fmean(far[key]))]
        self.spec = self._with(found)

    def _with(self, layers: Sequence[int]) -> MethodSpec:
        named, options = sorted(layers), [one for one in self.spec.options if one[0] != "layers"]
        label = f"{self.spec.label}:layers=[{','.join(map(str, named))}]"
        return replace(self.spec, label=label, options=(*options, ("layers", named)))
