"""Contexts of long passages: leaning sentences say nothing alone, and answers are where the pages say."""

import random
from statistics import median

import pytest

from ragcache.errors import ConfigError
from ragcache_eval.registry import names, wording
from ragcache_eval.registry.cases import PagesSettings, pages_cases
from ragcache_eval.registry.names import DataSplit, is_held_out
from ragcache_eval.registry.pages import PAGE_KINDS, PLACES, draw_pages

SIZES = [2, 3, 4, 7, 8, 16]


def contexts(num_passages, count=12, split=DataSplit.HELD_OUT):
    """Return contexts, with the broken lines of their pages joined."""
    rng = random.Random(f"{num_passages}/{count}")
    drawn = [draw_pages(rng, num_passages, split, split) for _ in range(count)]
    return [pages._replace(passages=[" ".join(text.split()) for text in pages.passages]) for pages in drawn]


def asked(kind, num_passages=8, count=12):
    return [(pages, one) for pages in contexts(num_passages, count) for one in pages.questions if one.kind == kind]


@pytest.mark.parametrize("size", SIZES)
def test_a_context_has_as_many_pages_as_asked_and_every_kind_of_question_comes_up(size):
    found = contexts(size, 20)
    assert all(len(pages.passages) == size for pages in found)
    kinds = {one.kind for pages in found for one in pages.questions}
    assert kinds == set(PAGE_KINDS)


def test_pages_are_150_to_300_tokens_long():
    from tools.mini.tokenizer import build_tokenizer

    tokenizer = build_tokenizer()
    rng = random.Random(1)
    drawn = [draw_pages(rng, 8, DataSplit.HELD_OUT, DataSplit.HELD_OUT) for _ in range(12)]
    lengths = [len(tokenizer.encode(text).ids) for pages in drawn for text in pages.passages]
    assert 150 < median(lengths) < 300
    assert sum(120 < length < 330 for length in lengths) > 0.97 * len(lengths)


@pytest.mark.parametrize("num_passages", [2, 3, 6])
def test_small_pages_have_few_articles_and_the_same_questions(num_passages):
    """This includes worlds so small that nothing can be corrected."""
    found = [draw_pages(random.Random(seed), num_passages, articles=(1, 2)) for seed in range(200)]
    assert all(len(pages.passages) == num_passages for pages in found)
    assert max(len(text) for pages in found for text in pages.passages) < 1400
    kinds = [{one.kind for one in pages.questions} for pages in found]
    assert all("leaning" in own for own in kinds)
    assert set().union(*kinds) == set(PAGE_KINDS)


def test_what_leans_stands_on_its_page_as_the_question_says():
    for pages, one in asked("leaning"):
        assert " ".join("".join(one.reference).split()) in pages.passages[one.gold[1]]


@pytest.mark.parametrize("kind", ["single", "two-hop"])
def test_an_answer_stands_on_as_many_pages_as_its_question_has_hops(kind):
    found = asked(kind)
    assert found
    for pages, (_, question, gold, *_) in found:
        assert len(set(gold)) == question.hops
        assert question.gold[-1].removeprefix("the ") in pages.passages[gold[0]]
        assert question.value in pages.passages[gold[-1]]


@pytest.mark.parametrize("size", [2, 8, 16])
def test_what_leans_is_named_on_the_page_before_only(size):
    found = asked("leaning", size)
    assert found
    for pages, (_, question, (first, second), *_) in found:
        name = question.gold[0].removeprefix("the ")
        assert second == first + 1
        assert name in pages.passages[first]
        assert question.value in pages.passages[second]
        stated = [f"{name} {text.format(v=question.value)}" for text in wording.HELD_OUT_PREDICATES[question.path]]
        assert not any(text in page for text in stated for page in pages.passages)


def test_what_hangs_on_a_heading_has_no_name_between():
    """The heading is its page's last line, and only remarks precede the sentence, as many as its place requires."""
    found = [(pages, one) for pages, one in asked("leaning", count=40) if one.reference[0]]
    assert {one.reference[0] for _, one in found} == {"She", "He", "It"}
    for pages, one in found:
        first, second = (pages.passages[rank] for rank in one.gold)
        name = one.question.gold[0].removeprefix("the ")
        assert first.endswith(name)
        before, sentence, behind = second.partition(" ".join("".join(one.reference).split()))
        assert sentence
        remarks = [text + "." for text in before.split(".") if text.strip()]
        assert all(text.strip() in wording.HELD_OUT_REMARKS for text in remarks)
        assert (len(remarks) == 0, not behind.strip()) == (one.place == "head", one.place == "end")


def test_pronouns_are_those_of_the_name():
    for _, one in asked("leaning", count=40):
        first = one.question.gold[0].split(" ")[0]
        woman, man = first in names.FEMALE_NAMES, first in names.MALE_NAMES
        assert one.reference[0] in ("", "She" if woman else "He" if man else "It")


def test_what_leans_stands_at_the_head_in_the_middle_and_at_the_end():
    found = asked("leaning", count=60)
    places = [one.place for _, one in found]
    assert all(places.count(place) > len(places) / 8 for place in PLACES)
    for pages, one in found:
        page = pages.passages[one.gold[1]]
        place = page.index(one.question.value) / len(page)
        if page.count(one.question.value) == 1:
            assert {"head": place < 0.4, "middle": 0.02 < place < 0.98, "end": place > 0.6}[one.place]


def test_candidates_count_the_sentences_that_lean():
    for size, least in ((4, 2), (8, 4), (16, 8)):
        for pages in contexts(size):
            leaning = [one for one in pages.questions if one.kind == "leaning"]
            assert {one.candidates for one in leaning} == {len(leaning)}
            assert len(leaning) >= least
            assert len({one.question.path for one in leaning}) == 1


def test_a_correction_holds_against_the_article():
    found = asked("conflicting")
    assert found
    for pages, (_, question, gold, *_) in found:
        name, relation = question.gold[0], question.path
        corrected = [
            text.format(s=f"{name} {said.format(v=question.value)}").replace(" a a", " an a")
            for text in wording.HELD_OUT_CORRECTIONS
            for said in wording.HELD_OUT_PREDICATES[relation]
        ]
        start = [text.split(question.value)[0][:40] for text in corrected]
        assert gold[0] != gold[1]
        assert any(text in pages.passages[gold[1]] for text in start)
        assert question.value in pages.passages[gold[1]]
        assert name.split(" ")[-1] in pages.passages[gold[0]]


def test_what_cannot_be_answered_is_stated_nowhere():
    for pages, (_, question, gold, *_) in asked("unanswerable"):
        assert gold == ()
        assert question.answer == wording.NO_ANSWER
        subject = _named(question.text)
        for said in wording.HELD_OUT_PREDICATES[question.path]:
            begin = said.split("{v}")[0]
            assert not any(f"{subject} {begin}" in page for page in pages.passages)


def _named(question):
    """Return the name in a question: its longest run of capitalised words after the first word."""
    words = question.rstrip("?").replace("'s", "").split(" ")
    runs = [[]]
    for word in words[1:]:
        runs = [*runs, []] if not word[:1].isupper() else [*runs[:-1], [*runs[-1], word]]
    return " ".join(max(runs, key=len))


def test_pages_hold_no_sentence_in_a_wording_of_training():
    for pages in contexts(8):
        names = {one.question.gold[0].removeprefix("the ") for one in pages.questions if one.question.gold}
        assert all(is_held_out(one.question.gold[0]) for one in pages.questions if one.question.gold)
        text = "\n".join(pages.passages)
        for name in names:
            for said in (said for group in wording.PREDICATES.values() for said in group):
                assert f"{name} {said.split('{v}')[0]}" not in text
        assert not any(one.question.text in _trained_questions(one) for one in pages.questions if one.kind == "single")


def _trained_questions(one):
    return [text.format(n=one.question.gold[0]) for text in wording.QUESTIONS[one.question.path]]


@pytest.mark.parametrize("kind", PAGE_KINDS)
def test_cases_mark_the_pages_that_the_answer_needs(kind):
    cases = pages_cases(PagesSettings(kind, (2, 8), questions=4))
    assert len(cases) == 8
    assert len({case.id for case in cases}) == len(cases)
    assert [case.cell["passages"] for case in cases] == [2] * 4 + [8] * 4
    wanted = {"single": 1, "two-hop": 2, "leaning": 2, "conflicting": 2, "unanswerable": 0}[kind]
    assert all(sum(bool(passage.is_gold) for passage in case.passages) == wanted for case in cases)
    assert all(("candidates" in case.cell) == (kind == "leaning") for case in cases)
    assert all(case.answers[0] in case.answers[1] for case in cases)
    assert pages_cases(PagesSettings(kind, (8,), 4)) == pages_cases(PagesSettings(kind, (8,), 100), limit=4)


@pytest.mark.parametrize("kind", PAGE_KINDS)
def test_what_leans_and_what_it_leans_on_are_of_one_document(kind):
    for case in pages_cases(PagesSettings(kind, (7,), 6)):
        texts, behind = [one.text for one in case.passages], [one.behind for one in case.passages]
        assert sum(map(len, behind)) == 3, "of 7 pages, 3 lean on the one before"
        assert all(near in ((), (texts[rank - 1],)) for rank, near in enumerate(behind))
        if kind == "leaning":
            first, second = (rank for rank, passage in enumerate(case.passages) if passage.is_gold)
            assert behind[second] == (texts[first],)
            assert second == first + 1


def test_settings_out_of_range_are_refused():
    with pytest.raises(ConfigError, match="kind=odd"):
        PagesSettings("odd")
    with pytest.raises(ConfigError, match="2 passages"):
        PagesSettings(passages=(1,))
