"""Questions over a document or two, with the answers that count as right."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import NamedTuple

from ragcache_eval.registry import wording
from ragcache_eval.registry.documents import Article, capitalised, with_article
from ragcache_eval.registry.names import DataSplit
from ragcache_eval.registry.world import World

MAX_ANSWER_TOKENS = 40
"""Enough for every answer, in tokens of the bundled models."""


class Question(NamedTuple):
    """A question with its answer, which is a whole sentence.

    gold:  ids of the documents that the answer needs, in the order of the hops
    path:  the relations that are followed, joined by "-"
    value: the requested value, which is part of the answer
    """

    text: str
    answer: str
    hops: int
    gold: tuple[str, ...]
    path: str
    value: str


def answerable_questions(
    rng: random.Random, world: World, documents: Iterable[Article], wordings: DataSplit = DataSplit.TRAIN
) -> list[Question]:
    """Ask each fact that the given documents of `world` state once, in wordings of the given split."""
    by_id = {document.id: document for document in documents}
    questions = []
    for document in by_id.values():
        facts = world.entities[document.id].facts
        for relation in document.relations:
            questions.append(single_hop(rng, document.id, relation, facts[relation], wordings))
            bridge = by_id.get(facts[relation])
            if bridge is not None:
                bridge_facts = {name: world.entities[bridge.id].facts[name] for name in bridge.relations}
                questions += _two_hops(rng, document.id, relation, bridge.id, bridge_facts, wordings)
    return questions


def leaning_questions(
    rng: random.Random, world: World, parts: Iterable[tuple[Article, Article]], wordings: DataSplit = DataSplit.TRAIN
) -> list[Question]:
    """Ask for each fact that a second part states. The answer needs both parts, as only the first has the name."""
    questions = []
    for first, second in parts:
        facts = world.entities[first.id].facts
        for relation in second.relations:
            asked = single_hop(rng, first.id, relation, facts[relation], wordings)
            questions.append(asked._replace(gold=(first.id, second.id)))
    return questions


def single_hop(rng: random.Random, name: str, relation: str, value: str, wordings: DataSplit) -> Question:
    """Ask for a fact that a single document states."""
    templates = wording.QUESTIONS if wordings is DataSplit.TRAIN else wording.HELD_OUT_QUESTIONS
    answer = capitalised(f"{name} {_stated(relation, value)}.")
    return Question(rng.choice(templates[relation]).format(n=name), answer, 1, (name,), relation, value)


def _stated(relation: str, value: str) -> str:
    return with_article(wording.ANSWERS[relation].format(v=value))


def _two_hops(
    rng: random.Random, name: str, first: str, bridge: str, facts: dict[str, str], wordings: DataSplit
) -> list[Question]:
    """Return a question for each path from `first` through the bridge to one of its facts.

    If `wordings` is held out, the phrase for the bridge, the question around it, or both are held-out wordings.
    """
    questions = []
    for hop in wording.TWO_HOPS:
        if hop.bridge != first or hop.relation not in facts:
            continue
        new_phrase = wordings is DataSplit.HELD_OUT and rng.random() < 0.67
        new_question = wordings is DataSplit.HELD_OUT and (not new_phrase or rng.random() < 0.5)
        phrases = wording.HELD_OUT_BRIDGES if new_phrase else wording.BRIDGES
        templates = wording.HELD_OUT_QUESTIONS if new_question else wording.QUESTIONS
        phrase = rng.choice(phrases[first]).format(n=name)
        text = rng.choice(templates[hop.relation]).format(n=phrase)
        stated = f"{_stated(first, bridge)}, which {_stated(hop.relation, facts[hop.relation])}"
        answer = capitalised(f"{name} {stated}.")
        questions.append(Question(text, answer, 2, (name, bridge), f"{first}-{hop.relation}", facts[hop.relation]))
    return questions
