"""Train the mini model for reuse: `python -m tools.mini.reuse --out DIR`.

Starts from the bundled base model and trains as `tools.mini.base` does: rows of the registry (`tools.mini.reuse_data`),
the packed forward pass, two processes on a CPU, checkpoints. Ids, sequences and masks are those of `ragcache train`, so
the result has the same layout.

A small model does not learn to use link tokens by itself: a question can read a fact of a single passage in the
passage, and if two passages must be read together, a guess among the candidates is almost as good. So in the first
stage most contexts hide their passages from the questions, which then see only the link tokens; and link tokens get
hints of what to hold half-way up the layers. The stage ends when most answers are right. In the second stage nothing is
hidden or hinted, and the learning rate falls to zero.

That makes single-hop answers worse, so there is a third stage, settling: half of its contexts get single-hop questions,
half are read as a single text, the learning rate falls to zero again from a lower value, and a running average of the
weights is saved. To settle a model that was through the first two stages: `--base DIR --start-stage settling`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from ragcache.models.trained_tokens import TrainedTokens
from ragcache_train.special_tokens import choose_spec, prepare_model
from ragcache_train.train_batches import Ask, EncodedRow, context_tokens, lay_out
from tools.mini.base import Options, Trainer, below, parse, train
from tools.mini.batches import IGNORED, padded, suffix_text
from tools.mini.evaluate import MINI_BASE
from tools.mini.packed import PackedBatch
from tools.mini.reuse_data import NUM_QUESTIONS, PASSAGES, draw_row
from tools.mini.tokenizer import BOS, EOS, PAD, SYSTEM_LINE, token_id

STANDARD, SEPARATE, HIDDEN = range(3)
"""How a batch is read: as a single text, passage by passage, or passage by passage and hidden from the questions."""
STAGES = ("taking-up", "answering", "settling")
TAKING_UP, ANSWERING, SETTLING = range(len(STAGES))
LINK_TOKENS = 5
STANDARD_SHARE = 0.4
"""Share of the batches read as a single text, in the second stage."""
TAKING_UP_SHARES = (0.15, 0.2, 0.65)
"""Shares of the batches read in each way, in the first stage."""
SETTLING_SHARES = {"single": 0.5, "two-hop": 0.2, "leaning": 0.3}
"""Shares of contexts by kind of question, in the third stage; other stages take `reuse_data.SHARES`."""
SETTLING_STANDARD_SHARE = 0.5
"""Share of the batches read as a single text, in the third stage."""
HIDDEN_PASSAGES = 8
"""Most passages of a context whose passages are hidden."""
SLOT_NOISE = 0.1
"""Distance of a link token's initial row from that of slot 0, as a share of their distance when drawn."""


@dataclass(frozen=True)
class ReuseOptions(Options):
    """Options of a run.

    base:            directory of the model to start from
    link_slots:      number of passages that have separate link tokens
    batch_passages:  approximate number of passages of a batch
    first_tokens:    most tokens of the first stage
    final_tokens, settling_tokens: tokens of the second and the third stage
    settling_rate:   learning rate that the third stage starts with, as a share of the run's
    average_decay:   decay of the weights' average, per step
    threshold:       share of right answers over hidden passages that ends the first stage
    """

    base: str = str(MINI_BASE)
    link_slots: int = PASSAGES[1]
    batch_passages: int = 20
    first_tokens: int = 4_000_000
    final_tokens: int = 9_000_000
    settling_tokens: int = 4_000_000
    settling_rate: float = 0.3
    average_decay: float = 0.997
    threshold: float = 0.75


class ReuseTrainer(Trainer):
    """A process of the run. Its progress has the accuracies of STANDARD, SEPARATE and HIDDEN batches."""

    options: ReuseOptions

    def __init__(self, options: ReuseOptions, rank: int, world_size: int) -> None:
        self.average: list[Tensor] = []
        """Mean of the weights over the third stage, in the order of `parameters`; empty before it."""
        super().__init__(options, rank, world_size)

    def _start(self) -> Any:
        """Return the base model, with rows for the new ids added if it lacks them."""
        self.fast = AutoTokenizer.from_pretrained(self.options.base, trust_remote_code=False)
        self.spec = choose_spec(self.fast, "link", LINK_TOKENS, self.options.link_slots, positions="reordered")
        self.prefix = [token_id(BOS), *self.tokenizer.encode(f"{SYSTEM_LINE}\n").ids]
        model = AutoModelForCausalLM.from_pretrained(self.options.base, dtype=torch.float32, trust_remote_code=False)
        prepare_model(model, self.spec, self.options.seed)
        if self.options.start_stage == TAKING_UP:
            start_slots_alike(model.get_input_embeddings().weight, self.spec)
        return model

    @torch.no_grad()
    def _save(self) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        if self.average:
            torch._foreach_copy_(self.parameters, self.average)
        self.master.to(torch.bfloat16).save_pretrained(self.out)
        self.fast.save_pretrained(self.out)

    def _finished(self) -> bool:
        progress = self.progress
        done = progress.stage == SETTLING and progress.stage_tokens >= self.options.settling_tokens
        return done or progress.tokens >= self.options.max_tokens

    def _schedule(self) -> float:
        """Return a factor: constant in the first stage, linear to zero in the others, with warm-ups where it rises."""
        progress, options = self.progress, self.options
        start = options.settling_rate if progress.stage == SETTLING else 1.0
        tokens = (math.inf, options.final_tokens, options.settling_tokens)[progress.stage]
        steps = progress.stage_step if progress.stage == SETTLING else progress.step
        warmed = min(1.0, (steps + 1) / options.warmup_steps)
        return start * warmed * max(0.0, 1.0 - progress.stage_tokens / tokens)

    @torch.no_grad()
    def _update(self) -> None:
        super()._update()
        if self.progress.stage == SETTLING:
            self.average = self.average or [p.detach().clone() for p in self.parameters]
            torch._foreach_lerp_(self.average, self.parameters, 1.0 - self.options.average_decay)

    def _state(self) -> dict[str, Tensor]:
        return super()._state() | {f"average/{i:03d}": tensor for i, tensor in enumerate(self.average)}

    def _load(self, state: dict[str, Tensor]) -> None:
        super()._load(state)
        self.average = [tensor for _, tensor in sorted(below(state, "average/").items())]

    def _accuracies(self) -> list[float]:
        return self.progress.accuracy[: HIDDEN + 1]

    def _stage_name(self) -> str:
        return STAGES[self.progress.stage]

    def _advance(self) -> None:
        progress, options = self.progress, self.options
        learned = progress.accuracy[HIDDEN] >= options.threshold or progress.stage_tokens >= options.first_tokens
        done = (learned, progress.stage_tokens >= options.final_tokens, False)[progress.stage]
        if done:
            progress.stage, progress.stage_step, progress.stage_tokens = progress.stage + 1, 0, 0

    def _draw(self, rng: random.Random) -> tuple[Tensor, PackedBatch]:
        reading = self._draw_reading(rng)
        passages = rng.randint(PASSAGES[0], HIDDEN_PASSAGES if reading == HIDDEN else PASSAGES[1])
        kind = "leaning" if reading == HIDDEN else self._draw_kind(rng)
        rows = [draw_row(rng, passages, kind) for _ in range(max(2, self.options.batch_passages // passages))]
        batch = self._pack(rows, reading)
        return torch.full(batch.question_ids.shape[:2], reading), batch

    def _draw_reading(self, rng: random.Random) -> int:
        if self.progress.stage == TAKING_UP:
            return rng.choices((STANDARD, SEPARATE, HIDDEN), TAKING_UP_SHARES)[0]
        share = SETTLING_STANDARD_SHARE if self.progress.stage == SETTLING else STANDARD_SHARE
        return STANDARD if rng.random() < share else SEPARATE

    def _draw_kind(self, rng: random.Random) -> str | None:
        if self.progress.stage < SETTLING:
            return None
        return rng.choices(list(SETTLING_SHARES), list(SETTLING_SHARES.values()))[0]

    def _pack(self, rows: Sequence[Any], reading: int) -> PackedBatch:
        encoded = [self._encode(row) for row in rows]
        apart = reading != STANDARD
        contexts, segments, lengths = [], [], []
        for row in encoded:
            layout = lay_out(row, self.spec, apart)
            lengths.append(context_tokens(row, self.spec, apart))
            contexts.append(layout.ids[: lengths[-1]])
            segments.append(layout.segments[: lengths[-1]])
        asks = [[[*ask.suffix, *ask.answer] for ask in row.asks] for row in encoded]
        labels = [[[IGNORED] * len(ask.suffix) + [*ask.answer] for ask in row.asks] for row in encoded]
        longest = max(len(ids) for row in asks for ids in row) - 1
        pad = token_id(PAD)
        helped = apart and (self.progress.stage == TAKING_UP or reading == HIDDEN)
        return PackedBatch(
            torch.tensor([padded(ids, max(lengths), pad) for ids in contexts]),
            torch.tensor(lengths),
            torch.tensor([[padded(ids[:-1], longest, pad) for ids in row] for row in asks]),
            torch.tensor([[padded(ids[1:], longest, IGNORED) for ids in row] for row in labels]),
            torch.tensor([padded(numbers, max(lengths), 0) for numbers in segments]),
            torch.tensor([reading == HIDDEN for _ in rows]),
            self._hints(rows, contexts) if helped else None,
        )

    def _hints(self, rows: Sequence[Any], contexts: Sequence[list[int]]) -> Tensor:
        """Return hints: a link token should hold its passage's entity and the end of a sentence that was cut."""
        slots = {i: slot for slot in range(self.spec.link_slots) for i in self.spec.link_ids(slot)}
        hints = []
        for number, (row, ids) in enumerate(zip(rows, contexts, strict=True)):
            names = [self._ids(subject)[-1] for subject in row.subjects]
            ends = [self._ids(text)[-3] for text in row.passages]  # before the full stop and the newline
            for place, slot in ((place, slots[i]) for place, i in enumerate(ids) if i in slots):
                cut = slot > 0 and row.leaning and row.subjects[slot] == row.subjects[slot - 1]
                hints.append([number, place, names[slot], ends[slot] if cut else names[slot]])
        return torch.tensor(hints)

    def _encode(self, row: Any) -> EncodedRow:
        """Return the row as ids, with NUM_QUESTIONS questions: if the row has fewer, some are asked again."""
        asked = (row.questions * NUM_QUESTIONS)[:NUM_QUESTIONS]
        asks = [Ask(self._ids(suffix_text(q.text)), [*self._ids(q.answer), token_id(EOS)]) for q in asked]
        return EncodedRow("qa", "", self.prefix, [self._ids(text) for text in row.passages], asks, None, False)

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text).ids


@torch.no_grad()
def start_slots_alike(embeddings: Tensor, spec: TrainedTokens) -> None:
    """Make the j-th link tokens of all slots start almost equal, so that all slots profit from what a slot learns."""
    first = embeddings[spec.link_ids(0)].clone()
    for slot in range(1, spec.link_slots):
        ids = spec.link_ids(slot)
        embeddings[ids] = first + SLOT_NOISE * (embeddings[ids] - first)


def stage(name: str) -> int:
    """Return the number of a stage. Raises ValueError for an unknown name."""
    return STAGES.index(name)


if __name__ == "__main__":
    train(parse(ReuseOptions, __doc__, start_stage=stage), ReuseTrainer)
