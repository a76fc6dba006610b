"""Scores by the name that a question set gives its own metric: LongBench's (arXiv 2308.14508, table 1)."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ragcache.errors import ConfigError
from ragcache_eval.metrics import contains_answer, rouge_l, token_f1

Metric = Callable[[str, Sequence[str], Sequence[str]], float]


def longbench_rouge(prediction: str, answers: Sequence[str]) -> float:
    """Return ROUGE-L's F-measure as LongBench computes it: by the library rouge, sentence by sentence, letters and
    endings unchanged. As there, the score is 0 if the library finds no sentence, or a sentence too long for its
    recursion.

    Raises ConfigError if rouge is not installed.
    """
    try:
        from rouge import Rouge
    except ImportError as error:
        raise _needs("rouge", "LongBench's ROUGE-L") from error
    scorer = Rouge(metrics=["rouge-l"], stats=["f"])

    def score(answer: str) -> float:
        try:
            return float(scorer.get_scores(prediction, answer)[0]["rouge-l"]["f"])
        except (ValueError, RecursionError):
            return 0.0

    return max(map(score, answers))


def classification(prediction: str, answers: Sequence[str], classes: Sequence[str]) -> float:
    """Return 1 / the number of classes that the prediction names, if the right class is among them, else 0.

    Classes that are part of the right class's name are not counted.
    """

    def score(answer: str) -> float:
        named = [one for one in classes if one in prediction and (one == answer or one not in answer)]
        return 1 / len(named) if answer in named else 0.0

    return max(map(score, answers))


def number_share(prediction: str, answers: Sequence[str]) -> float:
    """Return the share of the prediction's numbers that equal the answer's.

    It is used for passage counts.
    """
    found = re.findall(r"\d+", prediction)
    return max(found.count(_number(answer)) for answer in answers) / len(found) if found else 0.0


def _number(answer: str) -> str:
    numbers = re.findall(r"\d+", answer)
    return str(numbers[0]) if numbers else ""


def code_similarity(prediction: str, answers: Sequence[str]) -> float:
    """Edit similarity of the first line of code: letters in common, in order, over the letters of both (rapidfuzz).

    Lines with a mark of Markdown or of a comment are passed over. Raises ConfigError where rapidfuzz is not installed.
    """
    try:
        from rapidfuzz.fuzz import ratio
    except ImportError as error:
        raise _needs("rapidfuzz", "code similarity") from error
    lines = prediction.lstrip("\n").split("\n")
    line = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    return max(float(ratio(line, answer)) / 100 for answer in answers)


def _needs(package: str, what: str) -> ConfigError:
    return ConfigError(f"{what} needs the package {package}; pip install 'ragcache-kv[eval]'")


def _without_classes(score: Callable[[str, Sequence[str]], float]) -> Metric:
    return lambda prediction, answers, _classes: score(prediction, answers)


def _of_first_line(score: Metric, prediction: str, answers: Sequence[str], classes: Sequence[str]) -> float:
    """Score the first line, for few-shot sets: a model may continue with its own examples."""
    return score(prediction.lstrip("\n").split("\n")[0], answers, classes)


_PLAIN: dict[str, Any] = {
    "accuracy": contains_answer,
    "f1": token_f1,
    "rouge_l": rouge_l,
    "longbench_rouge": longbench_rouge,
    "number_share": number_share,
    "code_similarity": code_similarity,
}
METRICS: dict[str, Metric] = {
    **{name: _without_classes(score) for name, score in _PLAIN.items()},
    "classification": partial(_of_first_line, classification),
    "first_line_f1": partial(_of_first_line, _without_classes(token_f1)),
    "first_line_rouge": partial(_of_first_line, _without_classes(longbench_rouge)),
}
