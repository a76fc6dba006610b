"""Limits within which a method is safe, as options of `ragcache check`.

`ragcache --help` loads this module, so it imports nothing heavy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from ragcache.cli.terminal import option
from ragcache.errors import ConfigError

if TYPE_CHECKING:
    from ragcache_eval.report import Row


@dataclass(frozen=True)
class Thresholds:
    """Limits within which a method is safe; all are means over the questions. Each field's help text describes it."""

    min_agreement: Annotated[
        float, option("--min-agreement", "Least share of full prefill's answer tokens that the method chooses too.")
    ] = 0.95
    max_kl: Annotated[float, option("--max-kl", "Largest mean divergence from full prefill, nats a token.")] = 0.1
    min_same_answer: Annotated[
        float, option("--min-same-answer", "Least share of questions with full prefill's very answer.")
    ] = 0.85
    max_accuracy_drop: Annotated[
        float,
        option("--max-accuracy-drop", "Largest share of full prefill's accuracy lost, where gold answers are known."),
    ] = 0.03

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 0 or (name != "max_kl" and value > 1):
                allowed = "0 or more" if name == "max_kl" else "a share between 0 and 1"
                raise ConfigError(f"{name.replace('_', '-')} is {value}; choose {allowed}")

    def broken_by(self, row: Row, full: Row) -> str:
        """Return the thresholds that a method breaks as text; "" if it keeps them all.

        row, full: results of the method and of full prefill over the same questions
        """
        found = {name: estimate.mean for name, estimate in row.quality.items()}
        least = {"top1_answer": self.min_agreement, "same_answer": self.min_same_answer}
        wrong = [f"{_WORDS[n]} {found[n]:.3f} is below {limit:g}" for n, limit in least.items() if found[n] < limit]
        most = {"kl_answer": (found["kl_answer"], self.max_kl)}
        if "accuracy" in found:
            whole = full.quality["accuracy"].mean
            most["accuracy"] = (1 - found["accuracy"] / whole if whole else 0.0, self.max_accuracy_drop)
        wrong += [f"{_WORDS[n]} {value:.3f} is above {limit:g}" for n, (value, limit) in most.items() if value > limit]
        return "; ".join(wrong)


_WORDS = {
    "top1_answer": "top-1 agreement",
    "same_answer": "share of equal answers",
    "kl_answer": "KL from full prefill",
    "accuracy": "loss of accuracy",
}
