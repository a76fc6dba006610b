"""Scores of answers against values that are counted by hand."""

import pytest

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
    assert token_f1("dog", ["cat"]) == token_f1("", [""]) == 0
    assert token_f1("dog", ["cat", "dog"]) == 1
