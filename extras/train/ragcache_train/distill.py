"""Distillation: a student that reads passages apart learns from a frozen teacher that reads them as a single text.

The loss is KL(teacher || student) over every token after the passages, questions and answers alike, plus the relative
error of the hidden states of these tokens, averaged over layers (block distillation, arXiv 2605.15913). With a single
passage, no added tokens and the recipe "prefix" both read alike, and the loss of an untrained student is 0.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ragcache.errors import ConfigError
from ragcache.kv.rope import Rope
from ragcache.models.language_model import LanguageModel
from ragcache.models.trained_tokens import TrainedTokens
from ragcache_train.kept_logits import KeptLogits, kept_divergence
from ragcache_train.masked_pass import answer_logits, answer_states, divergence
from ragcache_train.train_batches import EncodedRow, collate, lay_out

LEAST = 1e-6
"""Squared length that a teacher's hidden state has at least, so that the relative error stays finite."""
EVALUATIONS = "evaluation.jsonl"
Measure = Callable[[Tensor], Tensor]
"""KL(teacher || student) of each token, float32 [num_labels], from the student's logits."""


def check_teacher(teacher: LanguageModel, student: LanguageModel, hidden_weight: float) -> None:
    """Check that a teacher's logits, and hidden states if these are compared, can be learned by the student.

    Raises ConfigError for another family, vocabulary, number of layers or width.
    """
    ours, theirs = (one.config.get_text_config(decoder=True) for one in (student, teacher))
    way = f"choose the model that {student.name} was made from, or leave the teacher out"
    if ours.model_type != theirs.model_type:
        raise ConfigError(
            f"the teacher {teacher.name} is of family {theirs.model_type!r} and {student.name} of {ours.model_type!r}; "
            + way
        )
    known = student.tokenizer.get_vocab()
    strange = next((name for name, id in teacher.tokenizer.get_vocab().items() if known.get(name) != id), None)
    if strange is not None:
        raise ConfigError(
            f"the teacher {teacher.name} has another vocabulary than {student.name} ({strange!r} differs); {way}"
        )
    shapes = [(one.num_hidden_layers, one.hidden_size) for one in (theirs, ours)]
    if hidden_weight and shapes[0] != shapes[1]:
        raise ConfigError(
            f"the teacher {teacher.name} has {shapes[0][0]} layers of width {shapes[0][1]} and {student.name} has "
            f"{shapes[1][0]} of {shapes[1][1]}, so their hidden states cannot be compared; set hidden_weight=0, "
            f"or {way}"
        )


class Distillation:
    """The loss of a batch that `collate_pairs` made. It sums its measurements until `take`.

    Args:
        teacher: the frozen model.
        rope: the student's, for passages that are read after a prefix.
        hidden_weight: weight of the hidden states' error.
        mixed: whether passes run in bfloat16.
        damage_weight: additional weight of a token at the mean damage: the KL between both readings by the teacher,
            that is, before any training. Weights are scaled so that their mean is 1.
        kept: the teacher's logits on disk; they replace its pass, so `hidden_weight` must be 0.
    """

    def __init__(
        self,
        teacher: PreTrainedModel,
        rope: Rope,
        hidden_weight: float,
        mixed: bool,
        damage_weight: float = 0.0,
        kept: KeptLogits | None = None,
    ) -> None:
        self.teacher = teacher.eval().requires_grad_(False)
        self.rope, self.hidden_weight, self.mixed = rope, hidden_weight, mixed
        self.damage_weight, self.kept = damage_weight, kept
        self._sums: list[Tensor] = []

    def __call__(
        self, model: nn.Module, inner: nn.Module, batch: dict[str, Any], num_labels: Tensor | int | None = None
    ) -> Tensor:
        with torch.autocast(batch["input_ids"].device.type, torch.bfloat16, enabled=self.mixed):
            measure, aims = self._truth(batch["teacher"])
            logits, states = answer_states(model, inner, batch, self.rope, hidden=self.hidden_weight > 0)
            weights = self._weights(batch, measure)
        kl = measure(logits)
        hidden = _relative_error(states, aims) if self.hidden_weight else torch.zeros_like(kl)
        total = ((kl + self.hidden_weight * hidden) * weights).sum()
        self._sums.append(torch.stack([kl.sum(), hidden.sum(), torch.full_like(kl.sum(), len(kl))]).detach())
        return total / (len(kl) if num_labels is None else num_labels)

    @torch.no_grad()
    def _truth(self, batch: dict[str, Any]) -> tuple[Measure, list[Tensor]]:
        """Return the KL from the teacher's logits as a function of the student's, and the teacher's hidden states."""
        if self.kept is not None and (found := self.kept.find(batch)) is not None:
            return partial(kept_divergence, *found), []
        truth, aims = answer_states(self.teacher, self.teacher, batch, hidden=self.hidden_weight > 0)
        if self.kept is not None:
            return partial(kept_divergence, *self.kept.keep(batch, truth)), []
        return partial(divergence, truth), aims

    @torch.no_grad()
    def _weights(self, batch: dict[str, Any], measure: Measure) -> Tensor | float:
        """Return the weight of each labelled token, float32 [num_labels]; 1 if all count alike."""
        if not self.damage_weight:
            return 1.0
        damage = measure(answer_logits(self.teacher, self.teacher, batch, self.rope))
        return (1 + self.damage_weight * damage / damage.mean().clamp_min(LEAST)) / (1 + self.damage_weight)

    def take(self) -> dict[str, float]:
        """Return the mean KL and hidden error per token since the last call; {} if there were no batches."""
        if not self._sums:
            return {}
        kl, hidden, count = torch.stack(self._sums).sum(0).tolist()
        self._sums.clear()
        return {"kl": kl / count, "hidden": hidden / count}


def _relative_error(states: Sequence[Tensor], aims: Sequence[Tensor]) -> Tensor:
    """Return the relative squared error of each token's hidden states, averaged over layers: float32 [num_labels]."""
    pairs = zip(states, aims, strict=True)
    apart = [(own - aim).square().sum(-1) / aim.square().sum(-1).clamp_min(LEAST) for own, aim in pairs]
    return torch.stack(apart).mean(0)


def train_layers(model: PreTrainedModel, spec: TrainedTokens) -> list[nn.Parameter]:
    """Make all weights trainable except the words' embeddings and the head, which student and teacher share.

    Of the embedding only the added tokens' rows are trained. If there are any, the embedding is returned, since it has
    a separate learning rate.
    """
    model.requires_grad_(True)
    embedding = model.get_input_embeddings().weight
    model.get_output_embeddings().weight.requires_grad_(False)
    added = sorted(spec.added_ids)
    embedding.requires_grad_(bool(added))
    if not added:
        return []
    trained = torch.zeros(len(embedding), 1, device=embedding.device, dtype=embedding.dtype)
    trained[added] = 1
    embedding.register_hook(lambda gradient: gradient * trained)
    return [embedding]


class Evaluation(TrainerCallback):  # type: ignore[misc]
    """Reads held-out rows every few steps, at the start and at the end, and writes `evaluation.jsonl`.

    A line has step, tokens, the mean and median over rows of the KL along answers to the teacher's full prefill
    (`kl`, `kl_median`), along questions (`kl_questions`), along answers when the student reads all as a single text
    (`kl_together`), and seconds.
    """

    def __init__(
        self,
        distill: Distillation,
        spec: TrainedTokens,
        rows: Sequence[EncodedRow],
        every: int,
        out: Path,
    ) -> None:
        self.distill, self.spec, self.rows, self.every, self.out = distill, spec, rows, every, out
        self._written = -1

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        path = self.out / EVALUATIONS
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
        kept = [line for line in lines if json.loads(line)["step"] <= state.global_step]
        if state.is_world_process_zero:
            path.write_text("".join(kept), encoding="utf-8")
        self._written = json.loads(kept[-1])["step"] if kept else -1
        if not kept:
            self._write(state, kwargs["model"])

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.global_step % self.every == 0:
            self._write(state, kwargs["model"])

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._write(state, kwargs["model"])

    def _write(self, state: TrainerState, model: nn.Module) -> None:
        if not state.is_world_process_zero or self._written == state.global_step:
            return
        self._written, started, training = state.global_step, time.monotonic(), model.training
        model.eval()
        found = self.measure(model)
        model.train(training)
        line = {"step": state.global_step, "tokens": state.num_input_tokens_seen, **found}
        line["seconds"] = round(time.monotonic() - started, 1)
        with (self.out / EVALUATIONS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    @torch.no_grad()
    def measure(self, model: nn.Module) -> dict[str, float]:
        """Return the figures of a line of `evaluation.jsonl`."""
        answers, questions, together = [], [], []
        for row in self.rows:
            learned = row._replace(asks=[ask.learned for ask in row.asks])
            is_answer = torch.tensor(
                [part for ask in row.asks for part in [False] * (len(ask.suffix) - 1) + [True] * len(ask.answer)]
            )
            apart, whole = (collate([lay_out(learned, self.spec, one)]) for one in (True, False))
            device = next(model.parameters()).device
            batches = [{k: v.to(device) if isinstance(v, Tensor) else v for k, v in b.items()} for b in (apart, whole)]
            with torch.autocast(device.type, torch.bfloat16, enabled=self.distill.mixed):
                truth = answer_logits(self.distill.teacher, self.distill.teacher, batches[1])
                found = [answer_logits(model, model, batch, self.distill.rope) for batch in batches]
            own, all_read = (divergence(truth, logits).cpu() for logits in found)
            answers.append(own[is_answer].mean().item())
            questions.append(own[~is_answer].mean().item())
            together.append(all_read[is_answer].mean().item())
        figures = {"kl": answers, "kl_questions": questions, "kl_together": together}
        means = {name: round(statistics.fmean(held), 5) for name, held in figures.items()}
        return means | {"kl_median": round(statistics.median(answers), 5), "rows": len(self.rows)}
