"""An entity written down as a passage of two to five sentences, or as two passages that are one text cut in two."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable
from typing import NamedTuple

from ragcache_eval.registry import wording
from ragcache_eval.registry.names import DataSplit
from ragcache_eval.registry.world import RELATIONS, Entity, World

MAX_MENTIONS = 4
CONTINUED = "{n}, continued"


class Article(NamedTuple):
    """A passage about one entity. `relations` are the facts that the text states."""

    id: str
    title: str
    text: str
    relations: tuple[str, ...]
    mentions: tuple[str, ...]


def write_document(
    rng: random.Random, entity: Entity, *, complete: bool = False, wordings: DataSplit = DataSplit.TRAIN
) -> Article:
    """Write `entity` down in words that `rng` chooses; `complete` states every fact and mention."""
    relations = list(RELATIONS[entity.kind])
    rng.shuffle(relations)
    if not complete and len(relations) > 1 and rng.random() < 0.2:
        relations.pop()
    mentions = list(entity.mentions[:MAX_MENTIONS])
    if not complete and rng.random() < 0.3:
        mentions = mentions[: rng.randint(0, len(mentions))]
    sentences = _fact_sentences(rng, entity, relations, wordings)
    if mentions:
        sentences.insert(rng.randint(1, len(sentences)), _mention_sentence(rng, entity.kind, mentions))
    if rng.random() < 0.15:
        sentences.insert(rng.randint(1, len(sentences)), rng.choice(wording.FILLERS))
    title = _title(entity, mentions if complete or rng.random() < 0.5 else [])
    return Article(entity.name, title, " ".join(sentences), tuple(relations), tuple(mentions))


def write_in_two(
    rng: random.Random, entity: Entity, last: str | None = None, wordings: DataSplit = DataSplit.TRAIN
) -> tuple[Article, Article]:
    """Write `entity` down and cut the text in mid-sentence, as chunks of a fixed length are cut.

    The first passage ends in the name, the second begins with what is said of it: only together do they state it.
    last: the relation that the cut sentence states; None: any
    """
    relations = list(RELATIONS[entity.kind])
    rng.shuffle(relations)
    if last is not None:
        relations.remove(last)
        relations.append(last)
    cut = rng.randint(1, len(relations) - 1)
    stated, left = relations[:cut], relations[cut] if last is None else last
    subject, predicate = _subject_and_predicate(rng, entity, left, is_first=False, wordings=wordings)
    first = " ".join([*_fact_sentences(rng, entity, stated, wordings), capitalised(subject)])
    return (
        Article(entity.name, _title(entity, []), first, tuple(stated), ()),
        Article(CONTINUED.format(n=entity.name), "", f"{predicate}.", (left,), ()),
    )


def capitalised(text: str) -> str:
    return text[0].upper() + text[1:]


def _title(entity: Entity, mentions: list[str]) -> str:
    """The name, and for a place or club whom or what it is known by."""
    name = entity.name.removeprefix("the ")
    return wording.TITLES[entity.kind].format(n=name, v=joined(mentions)) if mentions else name


def _fact_sentences(rng: random.Random, entity: Entity, relations: list[str], wordings: DataSplit) -> list[str]:
    """State one fact a sentence. The first one carries the full name, later ones may make do with the surname."""
    sentences: list[str] = []
    for relation in relations:
        subject, predicate = _subject_and_predicate(rng, entity, relation, is_first=not sentences, wordings=wordings)
        sentences.append(capitalised(f"{subject} {predicate}."))
    return sentences


def _subject_and_predicate(
    rng: random.Random, entity: Entity, relation: str, *, is_first: bool, wordings: DataSplit
) -> tuple[str, str]:
    is_short = not is_first and entity.kind == "person" and rng.random() < 0.6
    subject = entity.name.split(" ")[-1] if is_short else entity.name
    return subject, predicate_of(rng, relation, entity.facts[relation], wordings)


def predicate_of(rng: random.Random, relation: str, value: str, wordings: DataSplit) -> str:
    """Say that something has this value, without saying what has it."""
    templates = wording.PREDICATES if wordings is DataSplit.TRAIN else wording.HELD_OUT_PREDICATES
    return with_article(rng.choice(templates[relation]).format(v=value))


def _mention_sentence(rng: random.Random, kind: str, mentions: list[str]) -> str:
    template = rng.choice(wording.MENTIONS[kind])
    if len(mentions) == 1:
        template = template.replace("residents are", "resident is").replace("are {v}", "is {v}")
        template = template.replace("{v} live ", "{v} lives ")
    return template.format(v=joined(mentions))


def joined(words: list[str]) -> str:
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1]


def with_article(text: str) -> str:
    """Write "an architect" for "a architect"."""
    return re.sub(r" a (?=[aeio])", " an ", text)


# Questions over one document or two, with the answer that counts as right.


MAX_ANSWER_TOKENS = 40
"""Enough for every answer, in tokens of the bundled models."""


class Question(NamedTuple):
    """`gold` are the ids of the documents that the answer needs, in the order of the hops; `value` is what is asked."""

    text: str
    answer: str
    hops: int
    gold: tuple[str, ...]
    path: str
    value: str


def answerable_questions(
    rng: random.Random, world: World, documents: Iterable[Article], wordings: DataSplit = DataSplit.TRAIN
) -> list[Question]:
    """Ask each thing that the given documents of `world` answer once, in wordings of one split."""
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
    """Ask each thing that a second part states; only together with the part before it does it tell of whom."""
    questions = []
    for first, second in parts:
        facts = world.entities[first.id].facts
        for relation in second.relations:
            asked = single_hop(rng, first.id, relation, facts[relation], wordings)
            questions.append(asked._replace(gold=(first.id, second.id)))
    return questions


def single_hop(rng: random.Random, name: str, relation: str, value: str, wordings: DataSplit) -> Question:
    """Ask for what one document states."""
    templates = wording.QUESTIONS if wordings is DataSplit.TRAIN else wording.HELD_OUT_QUESTIONS
    answer = capitalised(f"{name} {_stated(relation, value)}.")
    return Question(rng.choice(templates[relation]).format(n=name), answer, 1, (name,), relation, value)


def _stated(relation: str, value: str) -> str:
    return with_article(wording.ANSWERS[relation].format(v=value))


def _two_hops(
    rng: random.Random, name: str, first: str, bridge: str, facts: dict[str, str], wordings: DataSplit
) -> list[Question]:
    """Follow every path `first` -> relation of the bridge. Held-out: the phrase, the question around it, or both."""
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
