"""How an answer is scored against gold answers.

Accuracy is KVLink's (A.2, after Liu et al., "Lost in the Middle"): some gold answer, normalised, stands in the
normalised prediction. Exact match and token F1 are LongBench's, which are SQuAD's. ROUGE-L is the library rouge-score's
F-measure with stemming, as CacheBlend takes it. Over several gold answers each score is the best one.
"""

from __future__ import annotations

import math
import re
import string
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from ragcache.errors import ConfigError

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalise(text: str) -> str:
    """SQuAD's: lower case, without ASCII punctuation and English articles, single spaces.

    A text of nothing but articles ("A") keeps them: as the empty string it would be found in every prediction.
    """
    plain = _plain(text)
    return " ".join(_ARTICLES.sub(" ", plain).split()) or plain


def contains_answer(prediction: str, answers: Sequence[str]) -> bool:
    """Accuracy: whether a gold answer is a substring of the prediction, both normalised.

    An answer of nothing but articles is looked for as a word, one of nothing but punctuation as it is.
    """
    return any(_contains(prediction, answer) for answer in answers)


def _contains(prediction: str, answer: str) -> bool:
    plain = _plain(answer)
    if not plain:
        return bool(answer.strip()) and answer.strip() in prediction
    if not _ARTICLES.sub(" ", plain).strip():
        return f" {plain} " in f" {_plain(prediction)} "
    return normalise(answer) in normalise(prediction)


def _plain(text: str) -> str:
    return " ".join(text.lower().translate(_PUNCTUATION).split())


def share_contained(prediction: str, answers: Sequence[str]) -> float:
    """RULER's recall, where every answer is wanted: the share of them that the prediction contains, in any case."""
    found = prediction.lower()
    return sum(answer.lower() in found for answer in answers) / len(answers)


def exact_match(prediction: str, answers: Sequence[str]) -> bool:
    found = normalise(prediction)
    return any(found == normalise(answer) for answer in answers)


def token_f1(prediction: str, answers: Sequence[str]) -> float:
    """Harmonic mean of precision and recall over the bags of normalised words."""
    return max(_f1(normalise(prediction).split(), normalise(answer).split()) for answer in answers)


def rouge_l(prediction: str, answers: Sequence[str]) -> float:
    """Raises ConfigError where rouge-score is not installed."""
    scorer = _rouge_scorer()
    return max(float(scorer.score(answer, prediction)["rougeL"].fmeasure) for answer in answers)


def _f1(predicted: list[str], gold: list[str]) -> float:
    shared = sum((Counter(predicted) & Counter(gold)).values())
    return 2 * shared / (len(predicted) + len(gold)) if shared else 0.0


def _rouge_scorer() -> Any:
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError as error:
        raise ConfigError("ROUGE-L needs the package rouge-score; pip install 'ragcache-kv[eval]'") from error
    return RougeScorer(["rougeL"], use_stemmer=True)


# Scores by the name that a question set gives its own metric: LongBench's (arXiv 2308.14508, table 1) and RULER's.


Metric = Callable[[str, Sequence[str], Sequence[str]], float]


def longbench_rouge(prediction: str, answers: Sequence[str]) -> float:
    """ROUGE-L's F-measure as LongBench takes it: of the library rouge, sentence by sentence, letters and endings as
    they are. 0 where the library finds no sentence, or one too long for its recursion, as there.

    Raises ConfigError where rouge is not installed.
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
    """One part for each class that the prediction names, if the right one is among them. Classes that are part of the
    right one's name are not counted."""

    def score(answer: str) -> float:
        named = [one for one in classes if one in prediction and (one == answer or one not in answer)]
        return 1 / len(named) if answer in named else 0.0

    return max(map(score, answers))


def number_share(prediction: str, answers: Sequence[str]) -> float:
    """The share of the prediction's numbers that are the answer's: passage counts and names such as "Paragraph 7"."""
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


def any_contained(prediction: str, answers: Sequence[str]) -> bool:
    """RULER's for questions with several gold answers: whether the prediction contains one of them, in any case."""
    return share_contained(prediction, answers) > 0


def _needs(package: str, what: str) -> ConfigError:
    return ConfigError(f"{what} needs the package {package}; pip install 'ragcache-kv[eval]'")


def _without_classes(score: Callable[[str, Sequence[str]], float]) -> Metric:
    return lambda prediction, answers, _classes: score(prediction, answers)


def _of_first_line(score: Metric, prediction: str, answers: Sequence[str], classes: Sequence[str]) -> float:
    """Few-shot sets: a model that goes on with examples of its own is judged by its first line."""
    return score(prediction.lstrip("\n").split("\n")[0], answers, classes)


_PLAIN: dict[str, Any] = {
    "accuracy": contains_answer,
    "all_contained": share_contained,
    "any_contained": any_contained,
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


# BM25 over a small corpus: near passages as distractors, with no model and the same in every process.


K1, B = 1.2, 0.75
_WORD = re.compile(r"\w+")


class BM25:
    """Okapi BM25 (Robertson and Zaragoza 2009) with the usual k1 and b."""

    def __init__(self, texts: Sequence[str]) -> None:
        bags = [Counter(_words(text)) for text in texts]
        lengths = np.array([sum(bag.values()) for bag in bags], dtype=np.float64)
        mean = lengths.mean() if len(bags) else 1.0
        self._norm = K1 * (1 - B + B * lengths / max(mean, 1.0))
        self._postings: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for place, bag in enumerate(bags):
            for word, count in bag.items():
                self._postings[word].append((place, count))
        self._count = len(bags)

    def ranked(self, query: str) -> list[int]:
        """Places of all texts, best first; ties in the corpus's order."""
        scores = np.zeros(self._count)
        for word in sorted(set(_words(query))):
            postings = self._postings.get(word, [])
            weight = math.log(1 + (self._count - len(postings) + 0.5) / (len(postings) + 0.5))
            for place, count in postings:
                scores[place] += weight * count * (K1 + 1) / (count + self._norm[place])
        return [int(place) for place in np.argsort(-scores, kind="stable")]


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


# How far one distribution over the next token is from another.


def kl_divergence(reference: Tensor, other: Tensor) -> Tensor:
    """KL(reference || other) in nats, float64 [...]; both are logits [..., vocab_size]."""
    p = reference.double().log_softmax(-1)
    q = other.double().log_softmax(-1)
    # exp(p) * (p - q) is 0 * inf where p has no mass at all.
    return (p.exp() * (p - q)).where(p.exp() > 0, 0.0).sum(-1).clamp_min(0.0)


def top1_agrees(reference: Tensor, other: Tensor) -> Tensor:
    """bool [...]: whether both would choose the same token."""
    return reference.argmax(-1) == other.argmax(-1)


# 95 % intervals: Wilson's for shares of independent questions, the bootstrap over questions for everything else.


Z = 1.959964
RESAMPLES = 2000


class Estimate(NamedTuple):
    """A mean over `size` values, with its 95 % interval."""

    mean: float
    low: float
    high: float
    size: int


def estimate(values: Sequence[float | bool], clusters: Sequence[Hashable] | None = None) -> Estimate:
    """The mean with its interval.

    values:   booleans take Wilson's interval, numbers the bootstrap's
    clusters: what each value belongs to. Values of one cluster (a question asked with its gold passage at every
              position) are not independent: whole clusters are drawn then, for booleans too
    Raises ValueError when there are no values.
    """
    if not values:
        raise ValueError("there is nothing to take a mean of")
    repeated = clusters is not None and len(set(clusters)) < len(clusters)
    mean = float(np.mean(np.asarray(values, dtype=np.float64)))
    if all(isinstance(value, bool | np.bool_) for value in values) and not repeated:
        low, high = wilson(sum(map(bool, values)), len(values))
    else:
        low, high = bootstrap(values, clusters if repeated else None)
    return Estimate(mean, low, high, len(values))


def wilson(right: int, asked: int) -> tuple[float, float]:
    """95 % interval of a share (Wilson 1927); holds its level near 0 and 1, where the normal one does not."""
    share = right / asked
    middle = share + Z * Z / (2 * asked)
    half = Z * (share * (1 - share) / asked + Z * Z / (4 * asked * asked)) ** 0.5
    scale = 1 + Z * Z / asked
    return max(0.0, (middle - half) / scale), min(1.0, (middle + half) / scale)


def bootstrap(values: Sequence[float | bool], clusters: Sequence[Hashable] | None = None) -> tuple[float, float]:
    """95 % percentile interval of the mean over 2,000 resamples of whole clusters; the same for the same values."""
    names = list(range(len(values))) if clusters is None else list(clusters)
    places = {name: place for place, name in enumerate(dict.fromkeys(names))}
    owner = np.array([places[name] for name in names])
    sums = np.bincount(owner, weights=np.asarray(values, dtype=np.float64))
    counts = np.bincount(owner)
    drawn = np.random.default_rng(0).integers(0, len(sums), size=(RESAMPLES, len(sums)))
    means = sums[drawn].sum(1) / counts[drawn].sum(1)
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)
