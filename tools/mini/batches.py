"""Training batches: a stage of the curriculum turned into token arrays."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from tokenizers import Tokenizer

from ragcache_eval.registry import wording
from ragcache_eval.registry.contexts import WORLD_A_PASSAGE, passage_text
from ragcache_eval.registry.documents import Article, capitalised, with_article, write_document
from ragcache_eval.registry.names import DataSplit
from ragcache_eval.registry.questions import Question, answerable_questions
from ragcache_eval.registry.world import RELATIONS, World, draw_world
from tools.mini.packed import PackedBatch
from tools.mini.tokenizer import BOS, EOS, PAD, SPECIAL_TOKENS, SYSTEM_LINE, token_id

IGNORED = -100
ALIKE_SHARE = 0.7
ALIKE = (("person", "town"), ("person", "club"), ("person", "town"), ("town", "river"), ("club", ""), ("river", ""))
"""For contexts of entities of the same kind: this kind, and the relation that leads to a second kind, if any."""


@dataclass(frozen=True)
class Stage:
    """A stage of the curriculum: a distribution of training rows.

    kind: "copy" (random tokens, then a part of them again), "sentences" (a passage is a sentence; the name, or the
        answer up to the value, asks for it), "completions" (the same over whole passages) or "questions"
    passages: least and largest number of passages in a context
    threshold: share of answers that must be exactly right before the next stage begins
    rate: learning rate, as a share of the run's
    two_hop_share: share of batches whose questions need two documents
    """

    name: str
    kind: str
    passages: tuple[int, int]
    batch_size: int
    num_questions: int
    threshold: float
    rate: float = 1.0
    two_hop_share: float = 0.0


class Encoded(NamedTuple):
    """A row as ids. context: of prefix and passages; questions: (suffix, answer with the end) of each"""

    context: list[int]
    questions: list[tuple[list[int], list[int]]]


class BatchMaker:
    """Draws batches, which depend on the seed of `rng` alone."""

    def __init__(self, tokenizer: Tokenizer, rng: random.Random) -> None:
        self.tokenizer = tokenizer
        self.rng = rng
        self._pad = token_id(PAD)
        self._eos = token_id(EOS)
        self._prefix = [token_id(BOS), *self._encode(f"{SYSTEM_LINE}\n")]
        self._plain_ids = range(len(SPECIAL_TOKENS), tokenizer.get_vocab_size())

    def draw(self, stage: Stage) -> PackedBatch:
        hops = 2 if self.rng.random() < stage.two_hop_share else 1
        passages = self.rng.randint(*stage.passages)
        rows = [self._row(stage, hops, passages) for _ in range(stage.batch_size)]
        return self.pack(rows)

    def pack(self, rows: Sequence[Encoded]) -> PackedBatch:
        """Return the rows as a padded batch. All rows must have the same number of questions."""
        context_len = max(len(row.context) for row in rows)
        question_len = max(len(suffix) + len(answer) - 1 for row in rows for suffix, answer in row.questions)
        contexts, questions, labels = [], [], []
        for row in rows:
            contexts.append(padded(row.context, context_len, self._pad))
            for suffix, answer in row.questions:
                questions.append(padded(suffix + answer[:-1], question_len, self._pad))
                labels.append(padded([IGNORED] * (len(suffix) - 1) + answer, question_len, IGNORED))
        shape = (len(rows), -1, question_len)
        lengths = torch.tensor([len(row.context) for row in rows])
        return PackedBatch(
            torch.tensor(contexts), lengths, torch.tensor(questions).view(shape), torch.tensor(labels).view(shape)
        )

    def _row(self, stage: Stage, hops: int, passages: int) -> Encoded:
        if stage.kind == "copy":
            return self._copy_row(stage.num_questions)
        if stage.kind == "sentences":
            return self._sentences_row(stage.num_questions, passages)
        return self._registry_row(stage, hops, passages)

    def _copy_row(self, num_questions: int) -> Encoded:
        length = self.rng.randint(16, 64)
        context = self.rng.choices(self._plain_ids, k=length)
        spans = []
        for _ in range(num_questions):
            start = self.rng.randrange(length - 10)
            spans.append((context[start : start + 2], context[start + 2 : start + 10]))
        return Encoded(context, spans)

    def _sentences_row(self, num_questions: int, passages: int) -> Encoded:
        """Return sentences with the same relation of several entities of the same kind, and questions for the values.

        A question is the name, or the answer up to the value.
        """
        world = draw_world(self.rng, DataSplit.TRAIN, passages * WORLD_A_PASSAGE)
        kind = self.rng.choice(ALIKE)[0]
        relation = self.rng.choice(RELATIONS[kind])
        entities = [entity for entity in world.entities.values() if entity.kind == kind]
        self.rng.shuffle(entities)
        context = [*self._prefix]
        asked = []
        for entity in entities[:passages]:
            value = entity.facts[relation]
            stated = self.rng.choice(wording.PREDICATES[relation]).format(v=value)
            context += self._encode(with_article(capitalised(f"{entity.name} {stated}.\n")))
            answer = with_article(capitalised(f"{entity.name} {wording.ANSWERS[relation].format(v=value)}."))
            start = answer.removesuffix(f" {value}.")
            asked += [(self._encode(asking), self._encode(f"{value}.")) for asking in (start, entity.name)]
        return Encoded(context, self.rng.choices(asked, k=num_questions))

    def _registry_row(self, stage: Stage, hops: int, passages: int) -> Encoded:
        documents, asked = draw_plain(self.rng, hops, passages, stage.num_questions)
        ask = self._completion if stage.kind == "completions" else self._question
        context = [*self._prefix]
        for document in documents:
            context += self._encode(passage_text(self.rng, document))
        return Encoded(context, [ask(question) for question in asked])

    def _question(self, question: Question) -> tuple[list[int], list[int]]:
        return self._encode(suffix_text(question.text)), [*self._encode(question.answer), self._eos]

    def _completion(self, question: Question) -> tuple[list[int], list[int]]:
        start = question.answer.removesuffix(f" {question.value}.")
        return self._encode(start), [*self._encode(f"{question.value}."), self._eos]

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text).ids


def draw_plain(
    rng: random.Random, hops: int, passages: int, num_questions: int
) -> tuple[list[Article], list[Question]]:
    """Draw documents of the training split, mostly of entities of the same kind, and questions that need `hops` each.

    If the documents answer too few questions, some are asked again in other words.
    """
    found: list[Question] = []
    while not found:
        if rng.random() < ALIKE_SHARE:
            world = draw_world(rng, DataSplit.TRAIN, passages * WORLD_A_PASSAGE)
            chosen = _alike(rng, world, hops, passages)
        else:
            world = draw_world(rng, DataSplit.TRAIN, passages)
            chosen = rng.sample(sorted(world.entities), passages)
        documents = [write_document(rng, world.entities[name]) for name in chosen]
        found = _questions(rng, world, documents, hops)
    while len(found) < num_questions:
        found += _questions(rng, world, documents, hops)
    return documents, rng.sample(found, num_questions)


def _questions(rng: random.Random, world: World, documents: list[Article], hops: int) -> list[Question]:
    return [question for question in answerable_questions(rng, world, documents) if question.hops == hops]


def _alike(rng: random.Random, world: World, hops: int, passages: int) -> list[str]:
    """Return the names of entities of the same kind, or of pairs in which the first entity refers to the second.

    Then only the name tells which passage a question is about: the kind of the answer does not help to guess.
    """
    kind, relation = rng.choice(ALIKE)
    entities = [entity for entity in world.entities.values() if entity.kind == kind]
    rng.shuffle(entities)
    if hops == 1:
        return [entity.name for entity in entities[:passages]]
    chosen: dict[str, None] = {}
    for entity in entities:
        if relation and len(chosen) < passages - 1:
            chosen |= {entity.name: None, entity.facts[relation]: None}
    names = list(chosen)
    rng.shuffle(names)
    return names


def suffix_text(question: str) -> str:
    return f"Question: {question}\nAnswer:"


def padded(ids: list[int], length: int, filler: int) -> list[int]:
    return ids + [filler] * (length - len(ids))
