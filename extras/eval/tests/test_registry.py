"""The registry's generator: the same text everywhere, held-out names kept apart, answers that the passages give."""

import random
import subprocess
import sys
from itertools import pairwise

import pytest

from ragcache.errors import ConfigError
from ragcache_eval.registry import wording
from ragcache_eval.registry.contexts import draw_leaning, draw_texts
from ragcache_eval.registry.documents import write_document, write_in_two
from ragcache_eval.registry.names import DataSplit, is_held_out
from ragcache_eval.registry.questions import answerable_questions, leaning_questions
from ragcache_eval.registry.world import RELATIONS, draw_world

SAMPLE = """
import random
from ragcache_eval.registry.documents import write_document
from ragcache_eval.registry.names import DataSplit
from ragcache_eval.registry.questions import answerable_questions
from ragcache_eval.registry.world import draw_world
rng = random.Random("sample")
for split in DataSplit:
    world = draw_world(rng, split, 12)
    documents = [write_document(rng, entity) for entity in world.entities.values()]
    print(documents, answerable_questions(rng, world, documents, split))
"""


def drawn(seed, split=DataSplit.TRAIN, wordings=DataSplit.TRAIN, num_entities=20, complete=False):
    rng = random.Random(seed)
    world = draw_world(rng, split, num_entities)
    documents = {name: write_document(rng, entity, complete=complete) for name, entity in world.entities.items()}
    return world, documents, answerable_questions(rng, world, documents.values(), wordings)


@pytest.mark.slow
def test_the_same_seed_gives_the_same_text_in_every_process():
    def sample(hash_seed):
        command = [sys.executable, "-c", SAMPLE]
        return subprocess.run(command, env={"PYTHONHASHSEED": hash_seed}, capture_output=True, check=True).stdout

    assert sample("1") == sample("2") != b""


@pytest.mark.parametrize("split", DataSplit)
def test_every_name_belongs_to_the_split(split):
    for seed in range(100):
        world, documents, _ = drawn(seed, split)
        names = [*world.entities, *(name for document in documents.values() for name in document.mentions)]
        names += [entity.facts[kind] for entity in world.entities.values() for kind in entity.facts if kind in LINKS]
        assert {is_held_out(name) for name in names} == {split is DataSplit.HELD_OUT}


LINKS = {"town", "club", "river"}


def test_about_one_name_in_five_is_held_out():
    rng = random.Random(0)
    from ragcache_eval.registry import names

    held_out = [is_held_out(names.draw_person_name(rng, True, 0.0)) for _ in range(4000)]
    assert 0.15 < sum(held_out) / len(held_out) < 0.25


@pytest.mark.parametrize("wordings", DataSplit)
def test_every_answer_stands_in_its_gold_documents(wordings):
    for seed in range(200):
        world, documents, questions = drawn(seed, DataSplit.HELD_OUT, wordings)
        assert questions
        for question in questions:
            gold = [documents[name] for name in question.gold]
            assert len(gold) == question.hops
            for document, relation in zip(gold, question.path.split("-"), strict=True):
                value = world.entities[document.id].facts[relation]
                assert value in document.text
                assert value in question.answer
            assert question.answer.lower().startswith(gold[0].id.lower())
            if question.hops == 2:
                assert world.entities[gold[0].id].facts[question.path.split("-")[0]] == gold[1].id
            assert gold[0].id in question.text
            if question.hops == 2:
                assert gold[1].id.removeprefix("the ") not in question.text


def test_a_question_has_one_answer_among_the_documents():
    """No other document of the world states the same relation of the same name."""
    for seed in range(50):
        _, _, questions = drawn(seed)
        asked = [(question.gold[0], question.path) for question in questions]
        assert len(asked) == len(set(asked))


@pytest.mark.parametrize("complete", [True, False])
def test_documents_name_their_entity_first_and_state_what_they_say_they_state(complete):
    for seed in range(100):
        world, documents, _ = drawn(seed, complete=complete)
        for name, document in documents.items():
            entity, short = world.entities[name], name.removeprefix("the ")
            assert document.title.startswith(short)
            assert short in document.text.split(". ")[0]
            stated = RELATIONS[entity.kind] if complete else document.relations
            assert sorted(document.relations) == sorted(stated)
            for value in [*(entity.facts[relation] for relation in stated), *document.mentions]:
                assert value in document.text
            assert 1 <= document.text.count(". ") + 1 <= 6
            for article, word in pairwise(document.text.split()):
                if article in ("a", "an"):
                    assert (article == "an") == (word[0] in "aeio"), document.text


def words(texts):
    return {word.strip(".,:?").lower() for text in texts for word in text.split() if "{" not in word}


def texts_of(*tables):
    return [text for table in tables for group in table.values() for text in group]


def test_held_out_wordings_are_new_but_their_words_are_not():
    asking = wording.QUESTIONS, wording.BRIDGES, wording.PREDICATES
    known = words(texts_of(*asking))
    held_out = wording.HELD_OUT_QUESTIONS, wording.HELD_OUT_BRIDGES, wording.HELD_OUT_PREDICATES
    assert words(texts_of(*held_out[:2])) <= known
    for trained, new in zip(asking, held_out, strict=True):
        assert trained.keys() == new.keys()
        assert not any(set(texts) & set(trained[relation]) for relation, texts in new.items())
    known |= words([*texts_of(wording.MENTIONS), *wording.REMARKS, *wording.CORRECTIONS, *wording.FILLERS])
    new = [*wording.HELD_OUT_REMARKS, *wording.HELD_OUT_CORRECTIONS]
    assert words([*texts_of(wording.HELD_OUT_PREDICATES), *new]) <= known
    assert not set(new) & {*wording.REMARKS, *wording.CORRECTIONS}


def test_held_out_two_hop_wordings_differ_from_every_trained_one():
    for seed in range(30):
        _, _, questions = drawn(seed, wordings=DataSplit.HELD_OUT)
        for question in questions:
            if question.hops == 2:
                first, second = question.path.split("-")
                name = question.gold[0]
                trained = {
                    template.format(n=phrase.format(n=name))
                    for phrase in wording.BRIDGES[first]
                    for template in wording.QUESTIONS[second]
                }
                assert question.text not in trained


def test_a_document_cut_in_two_names_its_entity_in_the_first_part_only():
    rng = random.Random(3)
    for seed in range(100):
        world, _, _ = drawn(seed)
        for name, entity in world.entities.items():
            first, second = write_in_two(rng, entity)
            assert name.removeprefix("the ") in first.text
            assert first.title == name.removeprefix("the ")
            assert not second.title
            assert not (set(name.split()) - {"the"}) & set(second.text.replace(".", "").split())
            assert first.text.split(" ")[-1] == name.split(" ")[-1]
            assert second.text[0].islower()
            assert first.relations
            assert len(second.relations) == 1
            assert not set(first.relations) & set(second.relations)
            for part in (first, second):
                assert all(entity.facts[relation] in part.text for relation in part.relations)


@pytest.mark.parametrize("wordings", DataSplit)
def test_leaning_questions_ask_what_second_parts_state(wordings):
    rng = random.Random(4)
    world, _, _ = drawn(4)
    parts = [write_in_two(rng, entity) for entity in world.entities.values()]
    questions = leaning_questions(rng, world, parts, wordings)
    assert len(questions) == sum(len(second.relations) for _, second in parts)
    by_id = {part.id: part for pair in parts for part in pair}
    templates = wording.QUESTIONS if wordings is DataSplit.TRAIN else wording.HELD_OUT_QUESTIONS
    for question in questions:
        first, second = (by_id[name] for name in question.gold)
        assert question.hops == 1
        assert question.value in second.text
        assert question.value not in first.text or question.value in first.id
        assert question.answer.lower().startswith(first.id.lower())
        assert question.text in [template.format(n=first.id) for template in templates[question.path]]


@pytest.mark.parametrize("passages", [2, 3, 8, 16])
def test_the_parts_of_a_document_stay_together(passages):
    for seed in range(20):
        context = draw_leaning(random.Random(seed), passages, DataSplit.HELD_OUT, DataSplit.HELD_OUT)
        ids = [passage.id for passage in context.passages]
        assert len(ids) == len(set(ids)) == passages
        for before, after in pairwise(ids):
            assert not after.endswith(", continued") or after == f"{before}, continued"
        assert sum(name.endswith(", continued") for name in ids) == passages // 2
        assert all(is_held_out(question.gold[0]) for question in context.questions)


def test_cases_of_the_leaning_kind_do_not_disturb_the_others():
    before = draw_texts(hops=2, num_cases=3)
    leaning = draw_texts(kind="leaning", num_cases=3)
    assert draw_texts(hops=2, num_cases=3) == before
    assert draw_texts(kind="leaning", num_cases=3) == leaning
    assert all(len(case.question.gold) == 2 and case.question.hops == 1 for case in leaning)
    with pytest.raises(ConfigError, match="plain, leaning"):
        draw_texts(kind="lean", num_cases=1)
