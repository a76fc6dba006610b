"""Scores of answers: values counted by hand, and a second implementation written another way."""

import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragcache_eval.metrics import contains_answer, exact_match, normalise, token_f1


def test_normalise():
    assert normalise("  The  U.S. and AN apple!\n") == "us and apple"
    assert normalise("theatre") == "theatre"
    assert normalise("A") == "a"


@pytest.mark.parametrize(
    ("prediction", "answers", "found"),
    [
        ("It was in 1961, he said.", ["1961"], True),
        ("It was in 1962.", ["1961", "1962"], True),
        ("Lana", ["Lana Wood"], False),
        ("the U.S.", ["US"], True),
        ("blood type A", ["A"], True),
        ("alphabet", ["A"], False),
        ("really?!", ["?!"], True),
        ("", ["yes"], False),
    ],
)
def test_accuracy_is_a_substring_after_normalising(prediction, answers, found):
    assert contains_answer(prediction, answers) is found


def test_exact_match():
    assert exact_match("The Lana Wood.", ["Natalie", "lana wood"])
    assert not exact_match("Lana Wood and others", ["Lana Wood"])


def test_token_f1_by_hand():
    # prediction: cat sat on mat (4), gold: cat sat (2), shared 2: precision 2/4, recall 2/2
    assert token_f1("The cat sat on the mat", ["a cat sat"]) == pytest.approx(2 * 0.5 * 1 / 1.5)
    # repeated words count as often as both have them
    assert token_f1("no no no", ["no no"]) == pytest.approx(2 * (2 / 3) * 1 / (2 / 3 + 1))
    assert token_f1("dog", ["cat"]) == 0
    assert token_f1("dog", ["cat", "dog"]) == 1


def slow_f1(prediction: str, gold: str) -> float:
    """Return F1 as SQuAD defines it, by removing shared words from a list one by one."""

    def words(text: str) -> list[str]:
        kept = "".join(c for c in text.lower() if c not in string.punctuation)
        found = [word for word in kept.split() if word not in ("a", "an", "the")]
        return found or kept.split()

    left, predicted, shared = words(gold), words(prediction), 0
    total = len(left)
    for word in predicted:
        if word in left:
            left.remove(word)
            shared += 1
    if not shared:
        return 0.0
    precision, recall = shared / len(predicted), shared / total
    return 2 * precision * recall / (precision + recall)


WORDS = st.lists(st.sampled_from(["the", "a", "Cat", "cat,", "sat", "mat.", "An", "no", "42", "!"]), max_size=8)


@settings(deadline=None)
@given(WORDS, WORDS)
def test_f1_and_match_against_another_implementation(prediction, gold):
    prediction, gold = " ".join(prediction), " ".join(gold)
    assert token_f1(prediction, [gold]) == pytest.approx(slow_f1(prediction, gold))
    if exact_match(prediction, [gold]) and normalise(gold):
        assert slow_f1(prediction, gold) == pytest.approx(1.0)
        assert contains_answer(prediction, [gold])
