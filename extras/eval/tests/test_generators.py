"""Generated questions have the properties that their names promise."""

import re

import pytest

from ragcache.errors import ConfigError
from ragcache_eval.case import CasePassage
from ragcache_eval.halves import completion_cases
from ragcache_eval.registry.cases import RegistrySettings, registry_cases
from ragcache_eval.sources import load_cases


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
        ("nq10", "neither a file nor"),
    ],
)
def test_sources_that_cannot_be_used_are_named(source, message):
    with pytest.raises(ConfigError, match=message):
        load_cases(source)
