"""Training batches: a stage of the curriculum turned into token arrays."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from tokenizers import Tokenizer

from ragcache.training.packed import PackedBatch
from ragcache.training.registry import (
    Document,
    Question,
    Split,
    World,
    answerable_questions,
    draw_world,
    write_document,
)
from ragcache.training.tokenizer import BOS, EOS, PAD, SPECIAL_TOKENS, SYSTEM_LINE, token_id

IGNORED = -100


@dataclass(frozen=True)
class Stage:
    """One distribution of the curriculum.

    kind: "copy" (random tokens, then a part of them again), "pairs" (bare name and value) or "registry".
    passages: least and largest number of passages in a context.
    two_hop_share: share of batches whose questions need two documents.
    relations: only these, or all.
    threshold: the share of answers that must be exactly right before the next stage joins.
    """

    name: str
    kind: str
    passages: tuple[int, int]
    batch_size: int
    num_questions: int
    threshold: float
    two_hop_share: float = 0.0
    relations: tuple[str, ...] = ()


class Encoded(NamedTuple):
    """context: ids of prefix and passages; questions: (suffix ids, answer ids with the end) each."""

    context: list[int]
    questions: list[tuple[list[int], list[int]]]


class BatchMaker:
    """Draws batches; everything depends on the seed of `rng` alone."""

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
        """Pad `rows`, which have the same number of questions."""
        context_len = max(len(row.context) for row in rows)
        question_len = max(len(suffix) + len(answer) - 1 for row in rows for suffix, answer in row.questions)
        contexts, questions, labels = [], [], []
        for row in rows:
            contexts.append(_padded(row.context, context_len, self._pad))
            for suffix, answer in row.questions:
                questions.append(_padded(suffix + answer[:-1], question_len, self._pad))
                labels.append(_padded([IGNORED] * (len(suffix) - 1) + answer, question_len, IGNORED))
        shape = (len(rows), -1, question_len)
        lengths = torch.tensor([len(row.context) for row in rows])
        return PackedBatch(
            torch.tensor(contexts), lengths, torch.tensor(questions).view(shape), torch.tensor(labels).view(shape)
        )

    def _row(self, stage: Stage, hops: int, passages: int) -> Encoded:
        if stage.kind == "copy":
            return self._copy_row(stage.num_questions)
        if stage.kind == "pairs":
            return self._pairs_row(stage.num_questions, passages)
        return self._registry_row(stage, hops, passages)

    def _copy_row(self, num_questions: int) -> Encoded:
        length = self.rng.randint(16, 64)
        context = self.rng.choices(self._plain_ids, k=length)
        spans = []
        for _ in range(num_questions):
            start = self.rng.randrange(length - 10)
            spans.append((context[start : start + 2], context[start + 2 : start + 10]))
        return Encoded(context, spans)

    def _pairs_row(self, num_questions: int, passages: int) -> Encoded:
        world = draw_world(self.rng, Split.TRAIN, passages)
        pairs = {}
        for entity in self.rng.sample(sorted(world.entities), passages):
            pairs[entity] = self.rng.choice(sorted(world.entities[entity].facts.values()))
        context = [*self._prefix]
        for name, value in pairs.items():
            context += self._encode(f"{name}: {value}.\n")
        asked = self.rng.choices(sorted(pairs), k=num_questions)
        return Encoded(context, [self._question(name + "?", pairs[name]) for name in asked])

    def _registry_row(self, stage: Stage, hops: int, passages: int) -> Encoded:
        questions: list[Question] = []
        while not questions:
            world = draw_world(self.rng, Split.TRAIN, passages)
            chosen = self.rng.sample(sorted(world.entities), passages)
            documents = [write_document(self.rng, world.entities[name]) for name in chosen]
            questions = self._questions(stage, hops, world, documents)
        while len(questions) < stage.num_questions:
            questions += self._questions(stage, hops, world, documents)
        asked = self.rng.sample(questions, stage.num_questions)
        return Encoded(self._context(documents), [self._question(q.text, q.answer) for q in asked])

    def _questions(self, stage: Stage, hops: int, world: World, documents: list[Document]) -> list[Question]:
        questions = answerable_questions(self.rng, world, documents)
        return [q for q in questions if q.hops == hops and (not stage.relations or q.path in stage.relations)]

    def _context(self, documents: Sequence[Document]) -> list[int]:
        context = [*self._prefix]
        for document in documents:
            context += self._encode(passage_text(self.rng, document))
        return context

    def _question(self, text: str, answer: str) -> tuple[list[int], list[int]]:
        return self._encode(suffix_text(text)), [*self._encode(answer), self._eos]

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text).ids


def suffix_text(question: str) -> str:
    return f"Question: {question}\nAnswer:"


def passage_text(rng: random.Random, document: Document) -> str:
    """The forms in which a passage may come out of a file: with or without its heading, its lines broken or not."""
    text = document.text
    if rng.random() < 0.1:
        words = text.split(" ")
        text = "".join(word + ("\n" if rng.random() < 0.1 else " ") for word in words[:-1]) + words[-1]
    form = rng.random()
    heading = "" if form < 0.25 else f"{document.title}\n" if form < 0.45 else f"# {document.title}\n\n"
    return f"{heading}{text}\n"


def _padded(ids: list[int], length: int, filler: int) -> list[int]:
    return ids + [filler] * (length - len(ids))
