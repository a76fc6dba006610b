"""Train the bundled mini model: `python -m tools.mini.base --out DIR`.

On a CPU, each core runs a process with a thread, and gradients are averaged; on a GPU a single process runs. Weights
and optimizer are float32, and passes run in bfloat16 (`--dtype float32` is ten times as fast on a processor without
bfloat16 instructions). Every batch depends on the seed, the step and the process alone, so a run that was stopped
continues from its last checkpoint with the same results.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.multiprocessing.spawn import spawn
from transformers import LlamaConfig, LlamaForCausalLM

from tools.mini.batches import BatchMaker
from tools.mini.curriculum import STAGES, draw_stage
from tools.mini.initial import start_with_induction
from tools.mini.optim import Adam, Muon
from tools.mini.packed import PackedBatch, packed_scores
from tools.mini.tokenizer import BOS, EOS, MAX_LENGTH, PAD, build_tokenizer, save_tokenizer, token_id


@dataclass(frozen=True)
class Options:
    """Options of a run.

    dtype:          dtype of the passes
    final_tokens:   tokens of the last stage, over which the learning rate falls to zero
    accuracy_decay: decay of a stage's running accuracy, per batch
    """

    out: str
    seed: int = 1
    workers: int = 2
    device: str = "cpu"
    dtype: str = "bfloat16"
    hidden_size: int = 256
    intermediate_size: int = 384
    num_layers: int = 4
    num_heads: int = 4
    muon_lr: float = 0.01
    adam_lr: float = 1e-3
    warmup_steps: int = 50
    min_stage_steps: int = 40
    final_tokens: int = 13_000_000
    accuracy_decay: float = 0.95
    log_every: int = 20
    save_every_s: float = 60.0
    max_tokens: int = 400_000_000
    start_stage: int = 0


Kind = TypeVar("Kind", bound=Options)


@dataclass
class Progress:
    """The progress of a run, which each checkpoint holds."""

    step: int = 0
    tokens: int = 0
    stage: int = 0
    stage_step: int = 0
    stage_tokens: int = 0
    seconds: float = 0.0
    accuracy: list[float] = field(default_factory=lambda: [0.0] * len(STAGES))


def build_model(options: Options, vocab_size: int) -> Any:
    """Return a new LlamaForCausalLM with initial weights that copy by match."""
    config = LlamaConfig(
        vocab_size=-(-vocab_size // 64) * 64,
        hidden_size=options.hidden_size,
        intermediate_size=options.intermediate_size,
        num_hidden_layers=options.num_layers,
        num_attention_heads=options.num_heads,
        num_key_value_heads=options.num_heads,
        head_dim=options.hidden_size // options.num_heads,
        max_position_embeddings=MAX_LENGTH,
        initializer_range=0.05,
        tie_word_embeddings=True,
    )
    torch.manual_seed(options.seed)
    model = LlamaForCausalLM(config)
    start_with_induction(model)
    return model


class Trainer:
    """A process of the run. `master` holds the float32 weights, `model` the copy of them that runs."""

    def __init__(self, options: Options, rank: int, world_size: int) -> None:
        self.options, self.rank, self.world_size = options, rank, world_size
        self.device = torch.device(options.device)
        self.out = Path(options.out)
        self.tokenizer = build_tokenizer()
        self.master = self._start().to(self.device)
        dtype = getattr(torch, options.dtype)
        self.model = copy.deepcopy(self.master).to(dtype)
        self.model.model.rotary_emb.inv_freq = self.master.model.rotary_emb.inv_freq  # angles need float32
        named = dict(self.master.named_parameters())
        self.parameters = list(named.values())
        inner = [p for name, p in named.items() if p.ndim == 2 and "embed" not in name]
        self.muon = Muon(inner, dtype=dtype)
        self.adam = Adam([p for p in self.parameters if all(p is not other for other in inner)])
        self.progress = Progress(stage=options.start_stage)
        self._started = time.monotonic()
        self._losses: list[float] = []
        self._resume()

    def run(self) -> None:
        saved = time.monotonic()
        while not self._finished():
            self._step()
            now = time.monotonic()
            if self.rank == 0 and self.progress.step % self.options.log_every == 0:
                self._log(now)
            if self.rank == 0 and now - saved > self.options.save_every_s:
                self._save_checkpoint(now)
                saved = now
        if self.rank == 0:
            self._save_checkpoint(time.monotonic())
            self._save()

    def _start(self) -> Any:
        """Return the model to start from, in float32."""
        return build_model(self.options, self.tokenizer.get_vocab_size())

    def _accuracies(self) -> list[float]:
        return self.progress.accuracy[: self.progress.stage + 1]

    def _stage_name(self) -> str:
        return STAGES[self.progress.stage].name

    def _save(self) -> None:
        save_model(self.master, self.tokenizer, self.out)

    def _draw(self, rng: random.Random) -> tuple[Tensor, PackedBatch]:
        """Return the stage that each question counts for, int64 [batch, num_questions], and the batch of a step."""
        stage = draw_stage(rng, self.progress.stage)
        batch = BatchMaker(self.tokenizer, rng).draw(STAGES[stage])
        return torch.full(batch.question_ids.shape[:2], stage), batch

    def _finished(self) -> bool:
        last = self.progress.stage == len(STAGES) - 1
        done = last and self.progress.stage_tokens >= self.options.final_tokens
        return done or self.progress.tokens >= self.options.max_tokens

    def _step(self) -> None:
        progress = self.progress
        rng = random.Random(f"{self.options.seed}/{self.rank}/{progress.step}")
        stages, batch = self._draw(rng)
        batch = batch.to(self.device)
        self._copy_weights()
        scores = packed_scores(self.model, batch)
        scores.loss.backward()  # type: ignore[no-untyped-call]
        asked = torch.stack([scores.right.cpu().float(), torch.ones(stages.shape)], -1)
        counts = torch.zeros(len(STAGES), 2).index_add_(0, stages.flatten(), asked.flatten(0, 1))
        totals = torch.cat([counts.flatten(), torch.tensor([float(batch.num_tokens), scores.loss.item()])])
        self._reduce(totals)
        self._update()
        self._record(totals)

    def _copy_weights(self) -> None:
        with torch.no_grad():
            for copy, parameter in zip(self.model.parameters(), self.parameters, strict=True):
                copy.copy_(parameter)
                copy.grad = None

    def _reduce(self, totals: Tensor) -> None:
        """Average the gradients over processes into the master weights; sum `totals`."""
        gradients = [p.grad.float() for p in self.model.parameters()]
        if self.world_size > 1:
            flat = torch.cat([gradient.flatten() for gradient in gradients] + [totals])
            dist.all_reduce(flat)
            totals.copy_(flat[-totals.numel() :])
            pieces = torch.split(flat[: -totals.numel()] / self.world_size, [p.numel() for p in self.parameters])
            gradients = [piece.view_as(p) for piece, p in zip(pieces, self.parameters, strict=True)]
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient

    def _update(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        factor = self._schedule()
        self.muon.step(self.options.muon_lr * factor)
        self.adam.step(self.options.adam_lr * factor)

    def _schedule(self) -> float:
        """Return the learning rate's factor: warm-up, then constant by stage, then linear to zero in the last stage."""
        factor = min(1.0, (self.progress.step + 1) / self.options.warmup_steps) * STAGES[self.progress.stage].rate
        if self.progress.stage == len(STAGES) - 1:
            factor *= max(0.0, 1.0 - self.progress.stage_tokens / self.options.final_tokens)
        return factor

    def _record(self, totals: Tensor) -> None:
        progress = self.progress
        *_, tokens, loss = totals.tolist()
        progress.step += 1
        progress.stage_step += 1
        progress.tokens += int(tokens)
        progress.stage_tokens += int(tokens)
        self._losses.append(loss / self.world_size)
        decay = self.options.accuracy_decay
        for stage, (right, asked) in enumerate(totals[:-2].view(-1, 2).tolist()):
            if asked:
                progress.accuracy[stage] = decay * progress.accuracy[stage] + (1 - decay) * right / asked
        self._advance()

    def _advance(self) -> None:
        """Go on to the next stage if the current stage is learned."""
        progress = self.progress
        passed = progress.accuracy[progress.stage] >= STAGES[progress.stage].threshold
        if passed and progress.stage_step >= self.options.min_stage_steps:
            progress.stage, progress.stage_step, progress.stage_tokens = progress.stage + 1, 0, 0

    def _log(self, now: float) -> None:
        progress = self.progress
        line = {
            "step": progress.step,
            "tokens": progress.tokens,
            "seconds": round(progress.seconds + now - self._started, 1),
            "stage": self._stage_name(),
            "loss": round(sum(self._losses) / len(self._losses), 4),
            "accuracy": [round(value, 3) for value in self._accuracies()],
        }
        self._losses.clear()
        print(json.dumps(line), flush=True)

    def _save_checkpoint(self, now: float) -> None:
        """Write weights and optimizer beside the old checkpoint, then rename."""
        self.progress.seconds += now - self._started
        self._started = now
        self.out.mkdir(parents=True, exist_ok=True)
        metadata = {"progress": json.dumps(asdict(self.progress)), "options": json.dumps(asdict(self.options))}
        target = self.out / "checkpoint.safetensors"
        save_file(self._state(), target.with_suffix(".new"), metadata)
        os.replace(target.with_suffix(".new"), target)

    def _state(self) -> dict[str, Tensor]:
        """Return the tensors of a checkpoint."""
        state = {f"model/{name}": p.detach() for name, p in self.master.named_parameters()}
        state |= {f"muon/{name}": tensor for name, tensor in self.muon.state_dict().items()}
        return state | {f"adam/{name}": tensor for name, tensor in self.adam.state_dict().items()}

    def _resume(self) -> None:
        path = self.out / "checkpoint.safetensors"
        if not path.exists():
            return
        with safe_open(path, framework="pt") as file:
            self.progress = Progress(**json.loads(file.metadata()["progress"]))
        self._load(load_file(path))

    def _load(self, state: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for name, parameter in self.master.named_parameters():
                parameter.copy_(state[f"model/{name}"])
        self.muon.load_state_dict(below(state, "muon/"))
        self.adam.load_state_dict(below(state, "adam/"))


def save_model(model: Any, tokenizer: Any, directory: Path) -> None:
    """Write a Hugging Face model directory, weights in bfloat16."""
    directory.mkdir(parents=True, exist_ok=True)
    halved = copy.deepcopy(model).to(torch.bfloat16)
    halved.config.bos_token_id = halved.generation_config.bos_token_id = token_id(BOS)
    halved.config.eos_token_id = halved.generation_config.eos_token_id = token_id(EOS)
    halved.config.pad_token_id = halved.generation_config.pad_token_id = token_id(PAD)
    halved.save_pretrained(directory)
    save_tokenizer(tokenizer, directory)


def below(state: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}


def _work(rank: int, trainer: type[Trainer], options: Options, world_size: int, rendezvous: str) -> None:
    if options.device == "cpu":
        torch.set_num_threads(1)
    if world_size > 1:
        dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size)
    trainer(options, rank, world_size).run()
    if world_size > 1:
        dist.destroy_process_group()


def train(options: Options, trainer: type[Trainer] = Trainer) -> None:
    """Train to the end, from the last checkpoint in `options.out` if there is one."""
    world_size = options.workers if options.device == "cpu" else 1
    if world_size == 1:
        return _work(0, trainer, options, 1, "")
    rendezvous = Path(options.out).resolve() / "rendezvous"
    rendezvous.parent.mkdir(parents=True, exist_ok=True)
    rendezvous.unlink(missing_ok=True)
    spawn(_work, (trainer, options, world_size, str(rendezvous)), nprocs=world_size)  # type: ignore[no-untyped-call]
    return None


def parse(kind: type[Kind], doc: str | None, **types: Callable[[str], Any]) -> Kind:
    """Return the options that the command line gives, by a flag per field. types: of fields not written as they are"""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in asdict(kind(out="")).items():
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=types.get(name, type(value)), default=value, required=name == "out")
    return kind(**vars(parser.parse_args()))


if __name__ == "__main__":
    train(parse(Options, __doc__))
