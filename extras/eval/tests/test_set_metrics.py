"""The metrics of LongBench: values counted by hand, and edit similarity written another way."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragcache_eval.set_metrics import METRICS, code_similarity, longbench_rouge, number_share

TYPES = ("City", "Other location", "Location", "Date")


def score(name: str, prediction: str, *answers: str, classes: tuple[str, ...] = ()) -> float:
    return METRICS[name](prediction, answers, classes)


@pytest.mark.parametrize(
    ("prediction", "answer", "share"),
    [
        ("City", "City", 1.0),
        ("a City or a Date", "City", 0.5),
        ("Date", "City", 0.0),
        ("Other location", "Other location", 1.0),
        ("Other location: Location", "Other location", 0.5),  # "Location" is no part of "Other location"
        ("\n\nCity\nDate", "City", 1.0),  # what stands behind the first line is an example of the model's own
        ("", "City", 0.0),
    ],
)
def test_classification(prediction, answer, share):
    assert score("classification", prediction, answer, classes=TYPES) == share


def test_a_class_inside_the_right_ones_name_is_not_counted():
    assert score("classification", "Other location", "Other location", classes=("location", "Other location")) == 1.0
    assert score("classification", "Other location", "location", classes=("location", "Other location")) == 0.5


def test_share_of_the_numbers():
    assert number_share("There are 12 of them, not 13 or 12.", ("12",)) == pytest.approx(2 / 3)
    assert number_share("Paragraph 7", ("Paragraph 7",)) == 1.0
    assert number_share("seven", ("7",)) == 0.0
    assert number_share("17", ("7",)) == 0.0


def common_letters(a: str, b: str) -> int:
    """The longest common subsequence, letter by letter."""
    row = [0] * (len(b) + 1)
    for x in a:
        above, row = row, [0]
        for j, y in enumerate(b):
            row.append(above[j] + 1 if x == y else max(above[j + 1], row[-1]))
    return row[-1]


CODE = st.text("ab(x )=", max_size=12)


@settings(deadline=None)
@given(CODE, CODE)
def test_code_similarity_is_the_share_of_common_letters(line, answer):
    if not answer:
        return
    expected = 2 * common_letters(line, answer) / (len(line) + len(answer))
    assert code_similarity(line, (answer,)) == pytest.approx(expected, abs=1e-6)


def test_code_similarity_reads_the_first_line_of_code():
    assert code_similarity("\n# a comment\n```python\nreturn x\ny = 1", ("return x",)) == 1.0
    assert code_similarity("// nothing", ("return x",)) == 0.0


def test_longbench_rouge_by_hand():
    # the cat sat / the cat ran away: two words in common order, of three and of four
    precision, recall = 2 / 3, 2 / 4
    expected = 2 * precision * recall / (precision + recall)
    assert longbench_rouge("the cat sat", ("the cat ran away",)) == pytest.approx(expected, abs=1e-6)
    assert longbench_rouge("The cat", ("the cat",)) == pytest.approx(0.5, abs=1e-6)  # letters as they are
    assert longbench_rouge("running", ("runs", "running")) == pytest.approx(1.0, abs=1e-6)
    assert longbench_rouge("", ("the cat",)) == 0.0
    assert longbench_rouge("...", ("the cat",)) == 0.0


def test_few_shot_sets_are_judged_by_the_first_line():
    assert score("first_line_f1", "\nParis\nQuestion: Lima", "Paris") == 1.0
    assert score("f1", "\nParis\nQuestion: Lima", "Paris") == pytest.approx(0.5)
    assert score("first_line_rouge", "a b\nc d", "a b") == pytest.approx(1.0, abs=1e-6)
