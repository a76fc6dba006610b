"""Generated questions have the properties that their names promise."""

import re
from collections import Counter

import pytest

from ragcache.errors import ConfigError
from ragcache_eval.case import CasePassage
from ragcache_eval.halves import completion_cases
from ragcache_eval.needle import NeedleSettings, needle_cases
from ragcache_eval.registry import RegistrySettings, registry_cases
from ragcache_eval.ruler import TASKS, RulerSettings, ruler_cases
from ragcache_eval.sources import load_cases


def words(text: str) -> int:
    """A tokenizer for which every word is a token."""
    return len(text.split())


def whole(case) -> str:
    return " ".join(passage.text for passage in case.passages)


def test_the_needle_stands_once_at_its_depth():
    settings = NeedleSettings(lengths=(200, 600), depths=(0, 25, 50, 75, 100), passage=40, questions=2)
    cases = needle_cases(settings, words)
    assert len(cases) == 2 * 2 * 5
    for case in cases:
        text, answer = whole(case), case.answers[0]
        assert text.count(answer) == 1
        length, depth = case.cell["length"], case.cell["depth"]
        assert 0.9 * length <= words(text) <= length
        before, needle = text.split("The best thing to do in")
        longest = max(words(sentence) for sentence in re.split(r"(?<=[.!?]) ", text))
        assert abs(words(before) / (words(text) - words(needle.split(".")[0]) - 6) - depth / 100) <= longest / length
        assert sum(passage.is_gold for passage in case.passages) == 1
        assert answer in next(passage.text for passage in case.passages if passage.is_gold)
        assert all(
            words(passage.text) <= 40 or len(re.findall(r"[.!?]", passage.text)) == 1 for passage in case.passages
        )
        assert answer not in case.question


def test_a_haystack_of_ones_own_is_used(tmp_path):
    path = tmp_path / "hay.txt"
    path.write_text("Wet hay smells. Dry hay burns.\n")
    case = needle_cases(NeedleSettings((64,), (50,), 20, 1, str(path)), words)[0]
    hay = whole(case).replace(case.answers[0], "")
    assert re.fullmatch(r"(Wet hay smells\. |Dry hay burns\. |The best thing to do in [\w ]+ is to \. )+", f"{hay} ")
    with pytest.raises(ConfigError, match=r"none\.txt"):
        needle_cases(NeedleSettings(haystack=str(tmp_path / "none.txt")), words)


def test_the_same_settings_give_the_same_cases():
    settings = RulerSettings(questions=2, lengths=(300,))
    assert ruler_cases(settings, words) == ruler_cases(settings, words)
    assert ruler_cases(settings, words) != ruler_cases(RulerSettings(questions=2, lengths=(300,), seed=1), words)
    few, many = (needle_cases(NeedleSettings((100,), (50,), questions=n), words) for n in (2, 5))
    assert many[:2] == few


@pytest.mark.parametrize("task", TASKS)
def test_every_ruler_task_fills_its_length_and_answers_are_in_it(task):
    for case in ruler_cases(RulerSettings(task=task, lengths=(400,), questions=5, passage=60), words):
        assert 200 <= words(whole(case)) <= 400
        assert len(set(case.answers)) == len(case.answers)
        assert all(answer in whole(case) for answer in case.answers)
        assert case.all_wanted
        assert not any(answer in case.question for answer in case.answers)


def needles(case) -> list[tuple[str, str]]:
    return re.findall(r"One of the special magic numbers for ([\w-]+) is: (\d+)\.", whole(case))


UUID = r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"


@pytest.mark.parametrize(
    ("task", "key", "value", "hay"),
    [
        ("single_noise", r"\w+-\w+", r"\d{7}", "noise"),
        ("single_uuid", r"\w+-\w+", UUID, "prose"),
        ("multi_key_lines", r"\w+-\w+", r"\d{7}", "needles"),
        ("multi_key_uuids", UUID, UUID, "needles"),
    ],
)
def test_one_needle_in_noise_in_prose_and_among_needles(task, key, value, hay):
    for case in ruler_cases(RulerSettings(task=task, lengths=(300,), questions=5), words):
        found = re.findall(rf"One of the special magic \w+s for ({key}) is: ({value})\. ?", whole(case) + " ")
        held = dict(found)
        (asked,) = [name for name in held if f" {name} " in case.question]
        assert case.answers == (held[asked],)
        rest = re.sub(rf"One of the special magic \w+s for {key} is: {value}\. ?", "", whole(case))
        assert (len(found) > 10, rest.strip() == "") == ((hay == "needles",) * 2)
        sentences = [one for one in re.split(r"(?<=\.) ", rest.strip()) if one]
        assert (len(set(sentences)) == 5) == (hay == "noise")


@pytest.mark.parametrize(
    ("task", "keys", "values", "asked"),
    [("single", 1, 1, 1), ("multi_key", 4, 1, 1), ("multi_value", 1, 4, 1), ("multi_query", 4, 1, 4)],
)
def test_ruler_needles(task, keys, values, asked):
    for case in ruler_cases(RulerSettings(task=task, lengths=(300,), questions=5), words):
        found = needles(case)
        assert len({key for key, _ in found}) == keys
        assert len({value for _, value in found}) == len(found) == keys * values
        named = {key for key, _ in found if key in case.question}
        assert len(named) == asked
        assert set(case.answers) == {value for key, value in found if key in named}


def test_variables_form_one_chain():
    for case in ruler_cases(RulerSettings(task="variable_tracking", lengths=(300,), questions=5), words):
        value = re.search(r"value (\d+)", case.question)[1]
        held = {}
        for name, source in re.findall(r"VAR (\w+) = (?:VAR )?(\w+)\.", whole(case)):
            held[name] = held.get(source, source)  # in order: a source stands before what is made from it
        assert {name for name, found in held.items() if found == value} == set(case.answers)
        assert len(case.answers) == 5


@pytest.mark.parametrize(("task", "count"), [("common_words", 10), ("frequent_words", 3)])
def test_the_wanted_words_are_the_most_frequent_ones_without_a_tie(task, count):
    for case in ruler_cases(RulerSettings(task=task, lengths=(500,), questions=5), words):
        ranked = Counter(whole(case).split()).most_common()
        assert {word for word, _ in ranked[:count]} == set(case.answers)
        assert ranked[count - 1][1] > ranked[count][1]


def test_registry_gold_passages_state_the_answer():
    for settings in (RegistrySettings(questions=20), RegistrySettings(hops=2, questions=20)):
        for case in registry_cases(settings):
            gold = [passage for passage in case.passages if passage.is_gold]
            assert len(gold) == settings.hops
            assert len(case.passages) == 8
            last = case.answers[0].rstrip(".").split()[-1]
            assert any(last in passage.text for passage in gold), case


def test_registry_moves_the_gold_passage():
    settings = RegistrySettings(passages=(3, 5), positions=(0, 2), questions=4)
    cases = registry_cases(settings)
    assert len(cases) == 2 * 4 * 2
    for case in cases:
        assert [p.is_gold for p in case.passages].index(True) == case.cell["gold_position"]
        assert len(case.passages) == case.cell["passages"]
    assert len({case.id for case in cases}) == len(cases)
    assert len({case.cluster for case in cases}) == 2 * 4
    assert {p.text for p in cases[0].passages} == {p.text for p in cases[1].passages}


TEXTS = [
    "The river Arno rises in the Vale hills near the town.\nShort one.",
    "- a list\n- of things",
    "Dogs bark at night in the old town of Kelbrook by the sea.\n",
]


def test_completions_ask_for_the_rest_of_a_sentence():
    cases = completion_cases(TEXTS, questions=6, passages=2)
    for case in cases:
        assert len(case.passages) == 2
        gold = next(passage for passage in case.passages if passage.is_gold)
        start = re.search(r'"(.*) \.\.\."', case.question)[1]
        assert f"{start} {case.answers[0]}" in gold.text
    assert {p.text for case in cases for p in case.passages if p.is_gold} == {TEXTS[0], TEXTS[2]}
    assert completion_cases(TEXTS, questions=6, passages=2) == cases
    with pytest.raises(ConfigError, match="none of 1 passages"):
        completion_cases(["- a list"], questions=1, passages=2)


def test_passages_are_rendered_as_ingestion_renders_them():
    assert CasePassage("A text.\n\n", "A title").rendered() == "# A title\n\nA text.\n"
    assert CasePassage("# A title\n\nA text.", "A title").rendered() == "# A title\n\nA text.\n"
    assert CasePassage("    code()\n").rendered() == "    code()\n"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("registry:hop=2", "no setting 'hop'"),
        ("registry:hops=3", "hops=3 is unknown"),
        ("registry:hops=two", "is no number"),
        ("registry:hops=2,positions=0", "positions"),
        ("registry:hops", "no setting; write name=value"),
        ("needle:depths=120", "percentage"),
        ("ruler:task=none", "choose one of all, single"),
        ("nq10", "neither a file nor"),
    ],
)
def test_sources_that_cannot_be_used_are_named(source, message):
    with pytest.raises(ConfigError, match=message):
        load_cases(source, words)
