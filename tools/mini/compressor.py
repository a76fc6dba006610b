"""A token classifier of LLMLingua-2's form for the registry's text: `python -m tools.mini.compressor --out DIR`.

LLMLingua-2's own weights learned from a large model's abridgements. This one starts from the bundled base, and a word
has to stay where the base does not foresee it: a token is labelled by whether its surprisal is above the median of its
passage (LLMLingua's measure, arXiv 2310.05736). `ragcache ingest --compress DIR` takes it.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer

from tools.mini.batches import IGNORED
from tools.mini.evaluate import MINI_BASE
from tools.mini.reuse_data import PASSAGES, draw_row

BATCH = 32
LEARNING_RATE = 3e-4


def train(out: Path, steps: int, seed: int) -> float:
    """Save the classifier with its tokenizer. Returns the share of the last batch's tokens that it labels right."""
    torch.manual_seed(seed)
    tokenizer: Any = AutoTokenizer.from_pretrained(MINI_BASE, trust_remote_code=False)
    base = AutoModelForCausalLM.from_pretrained(MINI_BASE, dtype=torch.float32, trust_remote_code=False).eval()
    labels = {0: "drop", 1: "preserve"}
    model = AutoModelForTokenClassification.from_pretrained(
        MINI_BASE,
        dtype=torch.float32,
        id2label=labels,
        label2id={name: number for number, name in labels.items()},
        trust_remote_code=False,
    )
    optimizer, right = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE), 0.0
    for _, texts in zip(range(steps), _batches(seed), strict=False):
        batch = tokenizer(texts, return_tensors="pt", padding=True)
        wanted = _labels(base, batch)
        logits = model(**batch).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten(), ignore_index=IGNORED)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        known = wanted != IGNORED
        right = float((logits.argmax(-1) == wanted)[known].float().mean())
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return right


def _batches(seed: int) -> Iterator[list[str]]:
    rng = random.Random(f"compressor/{seed}")
    while True:
        passages = [text for _ in range(BATCH) for text in draw_row(rng, rng.randint(*PASSAGES)).passages]
        yield rng.sample(passages, BATCH)


@torch.no_grad()
def _labels(base: Any, batch: Any) -> Tensor:
    """int64 [passages, tokens]: 1 where a token's surprisal is above the median of its passage, IGNORED for filling and
    what nothing stands before."""
    ids, known = batch["input_ids"], batch["attention_mask"].bool()
    guesses = base(**batch).logits[:, :-1].log_softmax(-1)
    surprisal = -guesses.gather(2, ids[:, 1:, None]).squeeze(2)
    held = surprisal.masked_fill(~known[:, 1:], torch.nan)
    above = (held > held.nanmedian(1, keepdim=True).values).long().masked_fill(~known[:, 1:], IGNORED)
    return torch.cat([torch.full_like(ids[:, :1], IGNORED), above], dim=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    print(f"{train(arguments.out, arguments.steps, arguments.seed):.3f} of the last batch's labels")


if __name__ == "__main__":
    main()
