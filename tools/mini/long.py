"""Train the base model for long passages: `python -m tools.mini.long --out DIR`.

Starts from a short base model (`tools.mini.base`), doubles its layers and stretches its positions: behind every layer
comes one that changes nothing yet (its outputs start at zero), and YaRN (Peng et al., arXiv 2309.00071) makes room for
4,096 tokens. Then it goes on as `tools.mini.base` does, on pages of the registry, with some short contexts between.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from ragcache_eval.registry import PAGE_KINDS, Pages, draw_pages
from tools.mini.base import Options, Trainer, train
from tools.mini.batches import BatchMaker, Encoded
from tools.mini.curriculum import STAGES
from tools.mini.evaluate import MINI_BASE
from tools.mini.packed import PackedBatch
from tools.mini.page_data import draw_questions, draw_size
from tools.mini.tokenizer import MAX_LENGTH, build_tokenizer

TRAINED_LENGTH = 512
"""Tokens of the contexts that the short base model was trained on, about."""
SHORT_SHARE = 0.1
"""Share of the batches over short passages, as the base model was trained on."""
SHORT_STAGE = len(STAGES) - 1
LEANING_LAYER = 1
"""The layer, a new one, that learns to look from a sentence that leans to the name that it is about."""
CARRY_GAIN = 0.7
"""Of what it starts to write of it; at 1 it drowns names that stand in front."""


@dataclass(frozen=True)
class LongOptions(Options):
    """base: directory to start from, a short base model or one that this program made; carry: start the head that
    learns to look at names (`carry_names`); total_tokens: over which the learning rate falls to zero."""

    base: str = str(MINI_BASE)
    carry: bool = False
    total_tokens: int = 12_000_000
    muon_lr: float = 0.006
    adam_lr: float = 6e-4


def grow(base: Path, tokenizer: Tokenizer, seed: int) -> Any:
    """The base model with twice its layers and room for MAX_LENGTH tokens; it still computes the same, but for YaRN.

    A token that both tokenizers know keeps its embedding.
    """
    old = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, trust_remote_code=False)
    config: dict[str, Any] = old.config.to_dict()
    stretch = MAX_LENGTH / TRAINED_LENGTH
    yarn = {"rope_type": "yarn", "factor": stretch, "original_max_position_embeddings": TRAINED_LENGTH}
    config["rope_parameters"] = {**config["rope_parameters"], **yarn}
    config["num_hidden_layers"] = 2 * old.config.num_hidden_layers
    config["vocab_size"] = -(-tokenizer.get_vocab_size() // 64) * 64
    config.pop("layer_types", None)
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**config))
    with torch.no_grad():
        _take_embeddings(model, old, tokenizer, Tokenizer.from_file(str(base / "tokenizer.json")))
        model.model.norm.load_state_dict(old.model.norm.state_dict())
        for index, layer in enumerate(model.model.layers):
            if index % 2 == 0:
                layer.load_state_dict(old.model.layers[index // 2].state_dict())
            else:
                layer.self_attn.o_proj.weight.zero_()
                layer.mlp.down_proj.weight.zero_()
    return model


def _take_embeddings(model: Any, old: Any, tokenizer: Tokenizer, known: Tokenizer) -> None:
    rows: Tensor = model.get_input_embeddings().weight
    before: Tensor = old.get_input_embeddings().weight
    rows.copy_(before.mean(0) + before.std(0) * torch.randn(rows.shape))
    old_ids = known.get_vocab()
    for token, id in tokenizer.get_vocab().items():
        if token in old_ids:
            rows[id] = before[old_ids[token]]


@torch.no_grad()
def carry_names(model: Any) -> None:
    """Let the last head of LEANING_LAYER write what layer 0's last head writes, which carries the name before a
    predicate to it (`tools.mini.initial`): what reads such a name then reads the one that the head has found."""
    giver, taker = model.model.layers[0], model.model.layers[LEANING_LAYER]
    last = slice(-model.config.head_dim, None)
    scale = giver.input_layernorm.weight / taker.input_layernorm.weight
    taker.self_attn.v_proj.weight[last] = giver.self_attn.v_proj.weight[last] * scale
    taker.self_attn.o_proj.weight[:, last] = giver.self_attn.o_proj.weight[:, last] * CARRY_GAIN


class LongTrainer(Trainer):
    """One process of the run. The accuracies of its progress are those of PAGE_KINDS, and of short contexts."""

    options: LongOptions

    def _build_tokenizer(self) -> Tokenizer:
        return build_tokenizer(pages=True)

    def _start(self) -> Any:
        """The base grown, or as it is where it was grown already. Raises ValueError for one that knows other tokens."""
        model = self._load_base()
        if self.options.carry:
            carry_names(model)
        return model

    def _load_base(self) -> Any:
        base = Path(self.options.base)
        if AutoConfig.from_pretrained(base, trust_remote_code=False).rope_parameters["rope_type"] != "yarn":
            return grow(base, self.tokenizer, self.options.seed)
        if Tokenizer.from_file(str(base / "tokenizer.json")).get_vocab() != self.tokenizer.get_vocab():
            raise ValueError(f"{base} was trained with other tokens than pages have now; start from {MINI_BASE}")
        return AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, trust_remote_code=False)

    def _accuracies(self) -> list[float]:
        return self.progress.accuracy[: len(PAGE_KINDS) + 1]

    def _stage_name(self) -> str:
        return "pages"

    def _finished(self) -> bool:
        return self.progress.tokens >= min(self.options.total_tokens, self.options.max_tokens)

    def _schedule(self) -> float:
        warmed = min(1.0, (self.progress.step + 1) / self.options.warmup_steps)
        return warmed * max(0.0, 1.0 - self.progress.tokens / self.options.total_tokens)

    def _advance(self) -> None:
        """All is learned at once."""

    def _draw(self, rng: random.Random) -> tuple[Tensor, PackedBatch]:
        maker = BatchMaker(self.tokenizer, rng)
        if rng.random() < SHORT_SHARE:
            batch = maker.draw(STAGES[SHORT_STAGE])
            return torch.full(batch.question_ids.shape[:2], len(PAGE_KINDS)), batch
        size = draw_size(rng)
        passages = size.draw_passages(rng)
        rows: list[Encoded] = []
        kinds: list[list[int]] = []
        focus: list[tuple[int, int, int, int]] = []
        for _ in range(max(1, size.batch_pages // passages)):
            pages = draw_pages(rng, passages, articles=size.articles)
            asked = draw_questions(rng, pages.questions, size.num_questions)
            rows.append(maker.row(pages.passages, [one.question for one in asked]))
            kinds.append([PAGE_KINDS.index(one.kind) for one in asked])
            focus += [(LEANING_LAYER, len(rows) - 1, *seen) for seen in self._focus(pages, rows[-1])]
        return torch.tensor(kinds), maker.pack(rows)._replace(focus=torch.tensor(focus))

    def _focus(self, pages: Pages, row: Encoded) -> Iterator[tuple[int, int]]:
        """A place and what should be seen from there: a pronoun, and what is said of it, see the name in the heading.

        Without this a model of this size guesses among the candidates for millions of tokens.
        """
        encoded = [self.tokenizer.encode(text) for text in pages.passages]
        starts = [len(row.context) - sum(len(one.ids) for one in encoded[rank:]) for rank in range(len(encoded))]

        def place(rank: int, character: int) -> int:
            return starts[rank] + (encoded[rank].char_to_token(character) or 0)

        for asked in (one for one in pages.questions if one.kind == "leaning"):
            (first, second), sentence = asked.gold, "".join(asked.reference)
            heading = place(first, len(pages.passages[first].rstrip()) - 1)
            start = pages.passages[second].index(sentence)
            end = place(second, start + len(sentence.rstrip()) - 1)
            yield from ((one, heading) for one in range(place(second, start), end))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    defaults = asdict(LongOptions(out=""))
    numbers = ("total_tokens", "max_tokens", "seed", "workers", "muon_lr", "adam_lr")
    for name in ("out", "base", "device", "dtype", *numbers):
        value = defaults[name]
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value, required=name == "out")
    parser.add_argument("--carry", action="store_true")
    train(LongOptions(**vars(parser.parse_args())), LongTrainer)


if __name__ == "__main__":
    main()
