"""The registry's generator: the same text everywhere, held-out names kept apart, answers that the passages give."""

from __future__ import annotations

import random
import subprocess
import sys
from itertools import pairwise

import pytest

from ragcache.training.registry import Split, answerable_questions, draw_world, is_held_out, wording, write_document
from ragcache.training.registry.world import RELATIONS

SAMPLE = """
import random
from ragcache.training.registry import Split, answerable_questions, draw_world, write_document
rng = random.Random("sample")
for split in Split:
    world = draw_world(rng, split, 12)
    documents = [write_document(rng, entity) for entity in world.entities.values()]
    print(documents, answerable_questions(rng, world, documents, split))
"""


def drawn(seed, split=Split.TRAIN, wordings=Split.TRAIN, num_entities=20, complete=False):
    rng = random.Random(seed)
    world = draw_world(rng, split, num_entities)
    documents = {name: write_document(rng, entity, complete=complete) for name, entity in world.entities.items()}
    return world, documents, answerable_questions(rng, world, documents.values(), wordings)


def test_the_same_seed_gives_the_same_text_in_every_process():
    def sample(hash_seed):
        command = [sys.executable, "-c", SAMPLE]
        return subprocess.run(command, env={"PYTHONHASHSEED": hash_seed}, capture_output=True, check=True).stdout

    assert sample("1") == sample("2") != b""


@pytest.mark.parametrize("split", Split)
def test_every_name_belongs_to_the_split(split):
    for seed in range(100):
        world, documents, _ = drawn(seed, split)
        names = [*world.entities, *(name for document in documents.values() for name in document.mentions)]
        names += [entity.facts[kind] for entity in world.entities.values() for kind in entity.facts if kind in LINKS]
        assert {is_held_out(name) for name in names} == {split is Split.HELD_OUT}


LINKS = {"town", "club", "river"}


def test_about_one_name_in_five_is_held_out():
    rng = random.Random(0)
    from ragcache.training.registry import names

    held_out = [is_held_out(names.draw_person_name(rng, True, 0.0)) for _ in range(4000)]
    assert 0.15 < sum(held_out) / len(held_out) < 0.25


@pytest.mark.parametrize("wordings", Split)
def test_every_answer_stands_in_its_gold_documents(wordings):
    for seed in range(200):
        world, documents, questions = drawn(seed, Split.HELD_OUT, wordings)
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
    """No other document of the world gives the asked relation of the asked name."""
    for seed in range(50):
        _, _, questions = drawn(seed)
        asked = [(question.gold[0], question.path) for question in questions]
        assert len(asked) == len(set(asked))


def test_documents_state_what_they_say_they_state():
    for seed in range(100):
        world, documents, _ = drawn(seed, complete=True)
        for name, document in documents.items():
            entity = world.entities[name]
            assert sorted(document.relations) == sorted(RELATIONS[entity.kind])
            for value in [*entity.facts.values(), *document.mentions]:
                assert value in document.text
            assert 1 <= document.text.count(". ") + 1 <= 6


def test_documents_name_their_entity_first():
    for seed in range(100):
        _, documents, _ = drawn(seed)
        for name, document in documents.items():
            first_sentence = document.text.split(". ")[0]
            assert name.removeprefix("the ") in first_sentence
            assert document.title.startswith(name.removeprefix("the "))


def words(text):
    return set(text.replace("{n}", "").replace("?", "").replace("'s", "").lower().split())


def test_held_out_wordings_are_new_but_their_words_are_not():
    for trained, held_out in (
        (wording.QUESTIONS, wording.HELD_OUT_QUESTIONS),
        (wording.BRIDGES, wording.HELD_OUT_BRIDGES),
    ):
        tables = (wording.QUESTIONS, wording.BRIDGES, wording.PREDICATES)
        known = set().union(*(words(text) for table in tables for group in table.values() for text in group))
        assert trained.keys() == held_out.keys()
        for relation, texts in held_out.items():
            assert not set(texts) & set(trained[relation])
            assert set().union(*map(words, texts)) <= known


def test_held_out_two_hop_wordings_differ_from_every_trained_one():
    for seed in range(30):
        _, _, questions = drawn(seed, wordings=Split.HELD_OUT)
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


def test_articles_agree_with_professions():
    for seed in range(200):
        _, documents, _ = drawn(seed)
        for document in documents.values():
            for article, word in pairwise(document.text.split()):
                if article in ("a", "an"):
                    assert (article == "an") == (word[0] in "aeio"), document.text
