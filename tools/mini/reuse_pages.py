"""Train the long base model for reuse: `python -m tools.mini.reuse_pages --out DIR --variant link5`.

The stages of `tools.mini.reuse`, over the pages that `tools.mini.long` trains on. In the first one, pages that are
hidden from the questions are small, so that the same tokens hold more sentences that lean; hints tell link tokens the
name that such a sentence hangs on and what it says, and the head that looks at names is shown the name.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from tokenizers import Encoding, Tokenizer
from torch import Tensor

from ragcache_eval.registry import PageQuestion, Pages, draw_pages
from ragcache_train.train_batches import Ask, EncodedRow
from tools.mini.base import train
from tools.mini.batches import suffix_text
from tools.mini.evaluate import PACKAGE
from tools.mini.long import LEANING_LAYER
from tools.mini.packed import PackedBatch
from tools.mini.page_data import SMALL, draw_questions, draw_size
from tools.mini.reuse import (
    ANSWERING,
    HIDDEN,
    SEPARATE,
    STAGES,
    STANDARD,
    TAKING_UP,
    VARIANTS,
    ReuseOptions,
    ReuseTrainer,
    slots_by_id,
)
from tools.mini.tokenizer import EOS, build_tokenizer, token_id

MINI_LONG = PACKAGE / "mini_long"
LEANING_WHOLE, LEANING_APART = HIDDEN + 1, HIDDEN + 2
"""Where the answers to leaning questions are counted, beside those to all others."""
READING_LAYER, READING_HEAD = 2, 1
"""The head of mini-long that looks most at what is said of the name in a question: 0.95 of its attention."""
ANSWERING_LAYER = 4
"""The layer that learns to look for it at link tokens."""
HIDDEN_QUESTIONS = 4
"""Of a context whose pages are hidden; all lean."""


@dataclass(frozen=True)
class PageReuseOptions(ReuseOptions):
    """standard_share: of batches read as one text, in the second stage; hidden_share: of the others there, those that
    stay hidden and helped: what link tokens hold gets no better without them."""

    base: str = str(MINI_LONG)
    standard_share: float = 0.25
    hidden_share: float = 0.35
    threshold: float = 0.88
    first_tokens: int = 3_500_000
    final_tokens: int = 4_000_000
    settling_tokens: int = 8_000_000
    muon_lr: float = 0.006
    adam_lr: float = 6e-4


class PageRow(NamedTuple):
    """Pages and what is asked about them."""

    pages: Pages
    asked: Sequence[PageQuestion]

    @property
    def leaning(self) -> list[PageQuestion]:
        return [one for one in self.pages.questions if one.kind == "leaning"]


class PageReuseTrainer(ReuseTrainer):
    """One process of the run. The accuracies of its progress: read as one text, apart, hidden; leaning ones as one text
    and apart."""

    options: PageReuseOptions

    def _start(self) -> Any:
        """The base, its heads readied for link tokens."""
        model = super()._start()
        if self.spec is not None and self.spec.link_tokens and self.options.start_stage == TAKING_UP:
            read_links(model)
        return model

    def _build_tokenizer(self) -> Tokenizer:
        return build_tokenizer(pages=True)

    def _accuracies(self) -> list[float]:
        return self.progress.accuracy[: LEANING_APART + 1]

    def _standard_share(self) -> float:
        return self.options.standard_share

    def _draw_reading(self, rng: random.Random) -> int:
        reading = super()._draw_reading(rng)
        links = self.spec is not None and self.spec.link_tokens > 0
        if links and self.progress.stage == ANSWERING and reading == SEPARATE:
            return HIDDEN if rng.random() < self.options.hidden_share else SEPARATE
        return reading

    def _draw(self, rng: random.Random) -> tuple[Tensor, PackedBatch]:
        reading = self._draw_reading(rng)
        size = SMALL if reading == HIDDEN else draw_size(rng)
        passages = size.draw_passages(rng)
        rows = [
            self._draw_row(rng, passages, size.articles, HIDDEN_QUESTIONS if reading == HIDDEN else size.num_questions)
            for _ in range(max(1, size.batch_pages // passages))
        ]
        if reading == HIDDEN:
            rows = [replace_asked(rng, row) for row in rows]
        kinds = [[self._count_as(reading, one) for one in row.asked] for row in rows]
        return torch.tensor(kinds), self._pack(rows, reading)

    def _draw_row(self, rng: random.Random, passages: int, articles: tuple[int, int], count: int) -> PageRow:
        pages = draw_pages(rng, passages, articles=articles)
        return PageRow(pages, draw_questions(rng, pages.questions, count))

    def _count_as(self, reading: int, question: PageQuestion) -> int:
        if reading == HIDDEN or question.kind != "leaning":
            return reading
        return LEANING_WHOLE if reading == STANDARD else LEANING_APART

    def _encode(self, row: PageRow) -> EncodedRow:
        asks = [
            Ask(self._ids(suffix_text(one.question.text)), [*self._ids(one.question.answer), token_id(EOS)])
            for one in row.asked
        ]
        chunks = [self._ids(text) for text in row.pages.passages]
        return EncodedRow("qa", "", self.prefix, chunks, asks, None, False)

    def _hints(self, rows: Sequence[PageRow], contexts: Sequence[list[int]]) -> Tensor:
        """Behind the page that introduces something, its name; behind the next, that and what is said of it."""
        hints = []
        for number, (row, ids) in enumerate(zip(rows, contexts, strict=True)):
            links = self._links(ids)
            for asked in row.leaning:
                first, second = (links[rank] for rank in asked.gold)
                name = ids[self._heading(row, asked, first[0])]
                _, said = self._said(asked)
                hints += [[number, place, name, name] for place in first]
                hints += [[number, place, name, said[min(j, len(said) - 1)]] for j, place in enumerate(second)]
        return torch.tensor(hints)

    def _focus(self, rows: Sequence[PageRow], contexts: Sequence[list[int]], question_len: int) -> Tensor:
        """Link tokens behind both pages look at the name; what writes the answer looks at those behind the second."""
        focus = []
        start = max(map(len, contexts))
        for number, (row, ids) in enumerate(zip(rows, contexts, strict=True)):
            links = self._links(ids)
            for asked in row.leaning:
                first, second = (links[rank] for rank in asked.gold)
                heading = self._heading(row, asked, first[0])
                focus += [[LEANING_LAYER, number, place, heading] for place in (*first, *second)]
            for rank, asked in enumerate(row.asked):
                if asked.kind == "leaning":
                    before, said = self._said(asked)
                    place = start + rank * question_len + len(self._ids(suffix_text(asked.question.text))) + before - 1
                    seen = links[asked.gold[1]]
                    focus += [
                        [ANSWERING_LAYER, number, place + j, seen[min(j, len(seen) - 1)]] for j in range(len(said))
                    ]
        return torch.tensor(focus)

    def _links(self, ids: Sequence[int]) -> list[list[int]]:
        """By page, where its link tokens stand."""
        slots = slots_by_id(self.spec)
        found: list[list[int]] = [[] for _ in range(self.options.link_slots)]
        for place, i in enumerate(ids):
            if i in slots:
                found[slots[i]].append(place)
        return found

    def _heading(self, row: PageRow, asked: PageQuestion, links: int) -> int:
        """The place of the name that a sentence leans on: it ends its page, and link tokens follow from `links` on."""
        text = row.pages.passages[asked.gold[0]]
        encoded: Encoding = self.tokenizer.encode(text)
        return links - len(encoded.ids) + (encoded.char_to_token(len(text.rstrip()) - 1) or 0)

    def _said(self, asked: PageQuestion) -> tuple[int, list[int]]:
        """How many tokens of the answer stand before its value, and the value's."""
        question = asked.question
        encoded: Encoding = self.tokenizer.encode(question.answer)
        start = question.answer.rindex(question.value)
        first, last = (encoded.char_to_token(at) or 0 for at in (start, start + len(question.value) - 1))
        return first, encoded.ids[first : last + 1]


@torch.no_grad()
def read_links(model: Any) -> None:
    """Let the last head of ANSWERING_LAYER start as one that finds what is said of a name, in a layer below: what link
    tokens hold is there too late for that one."""
    giver, taker = model.model.layers[READING_LAYER], model.model.layers[ANSWERING_LAYER]
    size = model.config.head_dim
    read, last = slice(READING_HEAD * size, (READING_HEAD + 1) * size), slice(-size, None)
    scale = giver.input_layernorm.weight / taker.input_layernorm.weight
    for name in ("q_proj", "k_proj", "v_proj"):
        getattr(taker.self_attn, name).weight[last] = getattr(giver.self_attn, name).weight[read] * scale
    taker.self_attn.o_proj.weight[:, last] = giver.self_attn.o_proj.weight[:, read]


def replace_asked(rng: random.Random, row: PageRow) -> PageRow:
    """The row with questions that lean alone."""
    asked = row.leaning
    rng.shuffle(asked)
    return row._replace(asked=(asked * HIDDEN_QUESTIONS)[:HIDDEN_QUESTIONS])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    defaults = asdict(PageReuseOptions(out=""))
    tokens = ("first_tokens", "final_tokens", "settling_tokens", "max_tokens")
    shares = ("threshold", "hidden_share")
    others = ("seed", "workers", "device", "dtype", "muon_lr", "adam_lr")
    for name in ("out", "variant", "base", "start_stage", *tokens, *shares, *others):
        flag, value = f"--{name.replace('_', '-')}", defaults[name]
        choices = {"variant": list(VARIANTS), "start_stage": list(STAGES)}.get(name)
        if name == "start_stage":
            value = STAGES[value]
        parser.add_argument(flag, type=type(value), default=value, required=name == "out", choices=choices)
    given = vars(parser.parse_args())
    train(PageReuseOptions(**{**given, "start_stage": STAGES.index(given["start_stage"])}), PageReuseTrainer)


if __name__ == "__main__":
    main()
