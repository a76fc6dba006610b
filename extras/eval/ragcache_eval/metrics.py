"""How an answer is scored against gold answers.

Accuracy is KVLink's (A.2, after Liu et al., "Lost in the Middle"): the normalised prediction contains some gold answer,
also normalised. Exact match and token F1 are LongBench's, which are SQuAD's. Over several gold answers the best score
counts.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalise(text: str) -> str:
    """Return the text as SQuAD normalises it: lower case, no ASCII punctuation or English articles, single spaces.

    A text of nothing but articles ("A") keeps them: as the empty string it would be found in every prediction.
    """
    plain = _plain(text)
    return " ".join(_ARTICLES.sub(" ", plain).split()) or plain


def contains_answer(prediction: str, answers: Sequence[str]) -> bool:
    """Return the accuracy: whether a gold answer is a substring of the prediction, both normalised.

    An answer of only articles is searched as a word, an answer of only punctuation as it is.
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


def exact_match(prediction: str, answers: Sequence[str]) -> bool:
    found = normalise(prediction)
    return any(found == normalise(answer) for answer in answers)


def token_f1(prediction: str, answers: Sequence[str]) -> float:
    """Return the harmonic mean of precision and recall over the bags of normalised words, for the best gold answer."""
    return max(_f1(normalise(prediction).split(), normalise(answer).split()) for answer in answers)


def _f1(predicted: list[str], gold: list[str]) -> float:
    shared = sum((Counter(predicted) & Counter(gold)).values())
    return 2 * shared / (len(predicted) + len(gold)) if shared else 0.0
