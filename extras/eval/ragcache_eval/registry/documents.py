"""An entity written down as a passage of two to five sentences, or as two passages cut from the same text."""

from __future__ import annotations

import random
import re
from typing import NamedTuple

from ragcache_eval.registry import wording
from ragcache_eval.registry.names import DataSplit
from ragcache_eval.registry.world import RELATIONS, Entity

MAX_MENTIONS = 4
CONTINUED = "{n}, continued"


class Article(NamedTuple):
    """A passage about an entity. `relations` are the facts that the text states."""

    id: str
    title: str
    text: str
    relations: tuple[str, ...]
    mentions: tuple[str, ...]


def write_document(
    rng: random.Random, entity: Entity, *, complete: bool = False, wordings: DataSplit = DataSplit.TRAIN
) -> Article:
    """Return a passage about `entity` in words that `rng` draws. With `complete` it states every fact and mention."""
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
    """Return a text about `entity`, cut into two passages in mid-sentence, as chunks of a fixed length are cut.

    The first passage ends with the name, and the second begins with a statement about it: neither states it alone.
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
    """Return the name, and for a place or club the person or thing it is known by."""
    name = entity.name.removeprefix("the ")
    return wording.TITLES[entity.kind].format(n=name, v=joined(mentions)) if mentions else name


def _fact_sentences(rng: random.Random, entity: Entity, relations: list[str], wordings: DataSplit) -> list[str]:
    """Return a sentence for each fact. The first sentence has the full name, later ones may have only the surname."""
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
    """Return the predicate of a sentence that states `value`, in words that `rng` draws; its subject is left out."""
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
