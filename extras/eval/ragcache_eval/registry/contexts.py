"""Questions with the passages to read: contexts of whole documents, and of documents cut in two."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

from ragcache.errors import check_choice
from ragcache_eval.registry.documents import Article, write_document, write_in_two
from ragcache_eval.registry.names import DataSplit
from ragcache_eval.registry.questions import Question, answerable_questions, leaning_questions
from ragcache_eval.registry.world import RELATIONS, Entity, World, draw_world

KINDS = ("plain", "leaning")
WORLD_SIZE = 40
WORLD_A_PASSAGE = 6  # entities drawn for each passage, so that enough of them are of the same kind


class TextCase(NamedTuple):
    """A question over passages as text. gold: ranks of the passages that the answer needs."""

    passages: list[str]
    gold: tuple[int, ...]
    question: Question


def draw_texts(
    *,
    num_cases: int,
    hops: int = 1,
    kind: str = "plain",
    num_passages: int = 8,
    seed: int = 0,
    rare_share: float = 0.0,
    entities: DataSplit = DataSplit.HELD_OUT,
    wordings: DataSplit = DataSplit.HELD_OUT,
) -> list[TextCase]:
    """Draw questions over `num_passages` passages each.

    kind: "plain", over the gold passages and others of the same world, shuffled; or "leaning", over documents of like
    entities cut in two, about what a second part states (`hops` is then 1 and `rare_share` 0).
    """
    check_choice("kind", kind, KINDS)
    if kind == "leaning":
        rng = random.Random(f"evaluate/{seed}/leaning/{num_passages}")
        return [_leaning_text(rng, num_passages, entities, wordings) for _ in range(num_cases)]
    rng = random.Random(f"evaluate/{seed}/{hops}/{num_passages}")
    cases: list[TextCase] = []
    while len(cases) < num_cases:
        world = draw_world(rng, entities, WORLD_SIZE, rare_share)
        documents = {name: write_document(rng, entity) for name, entity in world.entities.items()}
        questions = [q for q in answerable_questions(rng, world, documents.values(), wordings) if q.hops == hops]
        question = rng.choice(questions)
        passages = [documents[name] for name in _passages(rng, world, question, num_passages)]
        cases.append(_text(rng, passages, question))
    return cases


class Leaning(NamedTuple):
    """A context of documents cut in two.

    questions: about statements of second parts
    plain:     about statements of first parts and whole documents
    """

    passages: list[Article]
    questions: list[Question]
    plain: list[Question]


def draw_leaning(
    rng: random.Random, passages: int, entities: DataSplit = DataSplit.TRAIN, wordings: DataSplit = DataSplit.TRAIN
) -> Leaning:
    """Draw documents and cut each into two adjacent passages; a document stays whole if `passages` is odd.

    All entities have the same kind, so that only the place of a second part shows which entity it is about.
    """
    world = draw_world(rng, entities, passages * WORLD_A_PASSAGE)
    kinds = [kind for kind in RELATIONS if len(_of_kind(world, kind)) >= (passages + 1) // 2]
    chosen = rng.sample(_of_kind(world, rng.choice(kinds)), (passages + 1) // 2)
    pairs = [write_in_two(rng, entity) for entity in chosen[: passages // 2]]
    whole = [write_document(rng, entity) for entity in chosen[passages // 2 :]]
    groups: list[tuple[Article, ...]] = [*pairs, *((document,) for document in whole)]
    rng.shuffle(groups)
    plain = answerable_questions(rng, world, [*(first for first, _ in pairs), *whole], wordings)
    asked = leaning_questions(rng, world, pairs, wordings)
    return Leaning([document for group in groups for document in group], asked, plain)


def _of_kind(world: World, kind: str) -> list[Entity]:
    return [entity for entity in world.entities.values() if entity.kind == kind]


def _leaning_text(rng: random.Random, num_passages: int, entities: DataSplit, wordings: DataSplit) -> TextCase:
    context = draw_leaning(rng, num_passages, entities, wordings)
    return _text(rng, context.passages, rng.choice(context.questions))


def _passages(rng: random.Random, world: World, question: Question, num_passages: int) -> list[str]:
    others = [name for name in world.entities if name not in question.gold]
    chosen = [*question.gold, *rng.sample(others, num_passages - len(question.gold))]
    rng.shuffle(chosen)
    return chosen


def _text(rng: random.Random, passages: Sequence[Article], question: Question) -> TextCase:
    gold = tuple(rank for rank, passage in enumerate(passages) if passage.id in question.gold)
    return TextCase([passage_text(rng, passage) for passage in passages], gold, question)


def passage_text(rng: random.Random, document: Article) -> str:
    """Return the passage in a form that a file may give it: with or without its heading, its lines broken or not."""
    text = document.text
    if rng.random() < 0.1:
        words = text.split(" ")
        text = "".join(word + ("\n" if rng.random() < 0.1 else " ") for word in words[:-1]) + words[-1]
    form = rng.random()
    heading = (
        "" if form < 0.25 or not document.title else f"{document.title}\n" if form < 0.45 else f"# {document.title}\n\n"
    )
    return f"{heading}{text}\n"
