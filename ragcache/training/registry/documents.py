"""An entity written down as a passage of two to five sentences, or as two passages of which the second leans on the first."""

from __future__ import annotations

import random
import re
from typing import NamedTuple

from ragcache.training.registry import wording
from ragcache.training.registry.world import RELATIONS, Entity

MAX_MENTIONS = 4
MAX_LEANING_FACTS = 1
CONTINUED = "{n}, continued"


class Document(NamedTuple):
    """A passage about one entity. `relations` are the facts that the text states."""

    id: str
    title: str
    text: str
    relations: tuple[str, ...]
    mentions: tuple[str, ...]


def write_document(rng: random.Random, entity: Entity, *, complete: bool = False) -> Document:
    """Write `entity` down in words that `rng` chooses; `complete` states every fact and mention."""
    relations = list(RELATIONS[entity.kind])
    rng.shuffle(relations)
    if not complete and len(relations) > 1 and rng.random() < 0.2:
        relations.pop()
    mentions = list(entity.mentions[:MAX_MENTIONS])
    if not complete and rng.random() < 0.3:
        mentions = mentions[: rng.randint(0, len(mentions))]
    sentences = _fact_sentences(rng, entity, relations)
    if mentions:
        sentences.insert(rng.randint(1, len(sentences)), _mention_sentence(rng, entity.kind, mentions))
    if rng.random() < 0.15:
        sentences.insert(rng.randint(1, len(sentences)), rng.choice(wording.FILLERS))
    title = _title(entity, mentions if complete or rng.random() < 0.5 else [])
    return Document(entity.name, title, " ".join(sentences), tuple(relations), tuple(mentions))


def write_in_two(rng: random.Random, entity: Entity) -> tuple[Document, Document]:
    """Write `entity` down and cut the text in two: the second passage says "It ..." and never names its entity.

    So chunking leaves it: whose facts it states, only the passage before it tells.
    """
    relations = list(RELATIONS[entity.kind])
    rng.shuffle(relations)
    cut = rng.randint(1, len(relations) - 1)
    stated, left = relations[:cut], relations[cut : cut + MAX_LEANING_FACTS]
    first = " ".join(_fact_sentences(rng, entity, stated))
    second = " ".join(_leaning_sentences(rng, entity, left))
    return (
        Document(entity.name, _title(entity, []), first, tuple(stated), ()),
        Document(CONTINUED.format(n=entity.name), "", second, tuple(left), ()),
    )


def capitalised(text: str) -> str:
    return text[0].upper() + text[1:]


def _title(entity: Entity, mentions: list[str]) -> str:
    """The name, and for a place or club whom or what it is known by."""
    name = entity.name.removeprefix("the ")
    return wording.TITLES[entity.kind].format(n=name, v=joined(mentions)) if mentions else name


def _fact_sentences(rng: random.Random, entity: Entity, relations: list[str]) -> list[str]:
    """State one fact a sentence. The first one carries the full name, later ones may make do with the surname."""
    sentences: list[str] = []
    for relation in relations:
        is_short = bool(sentences) and entity.kind == "person" and rng.random() < 0.6
        subject = entity.name.split(" ")[-1] if is_short else entity.name
        stated = rng.choice(wording.PREDICATES[relation]).format(v=entity.facts[relation])
        sentences.append(capitalised(with_article(f"{subject} {stated}.")))
    return sentences


def _leaning_sentences(rng: random.Random, entity: Entity, relations: list[str]) -> list[str]:
    """State one fact a sentence, each about "It", "She", "He" or "The club"."""
    sentences = []
    for relation in relations:
        subject = entity.pronoun if entity.kind == "person" or rng.random() < 0.5 else f"The {entity.kind}"
        stated = rng.choice(wording.PREDICATES[relation]).format(v=entity.facts[relation])
        sentences.append(with_article(f"{subject} {stated}."))
    return sentences


def _mention_sentence(rng: random.Random, kind: str, mentions: list[str]) -> str:
    template = rng.choice(wording.MENTIONS[kind])
    if len(mentions) == 1:
        template = template.replace("residents are", "resident is").replace("are {v}", "is {v}")
        template = template.replace("{v} live ", "{v} lives ")
    return template.format(v=joined(mentions))


def joined(words: list[str]) -> str:
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1]


def with_article(text: str) -> str:
    """Turn "a architect" into "an architect"."""
    return re.sub(r" a (?=[aeio])", " an ", text)
