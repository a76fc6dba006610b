"""Exact match of the mini model on held-out entities and wordings: `python -m tools.mini.evaluate`.

Plain transformers without reuse: a prompt is prefix, passages and suffix joined, and is answered greedily. The pieces
of a case are those of `ragcache.Prompt`, so the same cases measure fusion methods.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer

import ragcache
from ragcache_eval.registry.contexts import TextCase, draw_texts
from ragcache_eval.registry.questions import MAX_ANSWER_TOKENS, Question
from tools.mini.batches import suffix_text
from tools.mini.tokenizer import BOS, EOS, PAD, SYSTEM_LINE, token_id

PACKAGE = Path(ragcache.__file__).parent
MINI_BASE = PACKAGE / "mini_base"
MINI = PACKAGE / "mini"


class Case(NamedTuple):
    """A question as token ids. An answer is right if the decoded text equals `answer`."""

    prefix_ids: list[int]
    chunk_ids: list[list[int]]
    suffix_ids: list[int]
    question: Question

    @property
    def answer(self) -> str:
        return self.question.answer

    @property
    def input_ids(self) -> list[int]:
        return [*self.prefix_ids, *(token for chunk in self.chunk_ids for token in chunk), *self.suffix_ids]


def draw_cases(tokenizer: Tokenizer, **settings: Any) -> list[Case]:
    """Return the questions of `draw_texts`, which takes the settings, as token ids."""
    return [_case(tokenizer, text) for text in draw_texts(**settings)]


def exact_matches(model: Any, tokenizer: Tokenizer, cases: Sequence[Case], batch_size: int = 20) -> list[bool]:
    """Return, for each case, whether greedy decoding gives exactly the answer."""
    order = sorted(range(len(cases)), key=lambda index: len(cases[index].input_ids))
    right = [False] * len(cases)
    for start in range(0, len(order), batch_size):
        chosen = order[start : start + batch_size]
        for index, text in zip(chosen, _generate(model, tokenizer, [cases[i] for i in chosen]), strict=True):
            right[index] = text == cases[index].answer
    return right


def load(directory: Path) -> tuple[Any, Tokenizer]:
    """Load a saved mini model in float32, as any Hugging Face directory is loaded."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, trust_remote_code=False).eval()
    return model, Tokenizer.from_file(str(directory / "tokenizer.json"))


def _case(tokenizer: Tokenizer, text: TextCase) -> Case:
    return Case(
        [token_id(BOS), *tokenizer.encode(f"{SYSTEM_LINE}\n").ids],
        [tokenizer.encode(passage).ids for passage in text.passages],
        tokenizer.encode(suffix_text(text.question.text)).ids,
        text.question,
    )


@torch.no_grad()
def _generate(model: Any, tokenizer: Tokenizer, cases: Sequence[Case]) -> list[str]:
    """Decode a batch greedily, padded on the left."""
    length = max(len(case.input_ids) for case in cases)
    ids = torch.tensor([[token_id(PAD)] * (length - len(c.input_ids)) + c.input_ids for c in cases])
    output = model.generate(
        ids,
        attention_mask=(ids != token_id(PAD)).long(),
        max_new_tokens=MAX_ANSWER_TOKENS,
        do_sample=False,
        eos_token_id=token_id(EOS),
        pad_token_id=token_id(PAD),
    )
    return [tokenizer.decode(row.tolist(), skip_special_tokens=True) for row in output[:, length:]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MINI)
    parser.add_argument("--questions", type=int, default=500)
    parser.add_argument("--passages", type=int, nargs="+", default=[8])
    parser.add_argument("--rare-share", type=float, default=0.0, help="of words in names without a token of their own")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    model, tokenizer = load(arguments.model)
    for passages in arguments.passages:
        for kind, hops in (("plain", 1), ("plain", 2), ("leaning", 1)):
            cases = draw_cases(
                tokenizer,
                hops=hops,
                kind=kind,
                num_cases=arguments.questions,
                num_passages=passages,
                seed=arguments.seed,
                rare_share=arguments.rare_share,
            )
            share = sum(exact_matches(model, tokenizer, cases)) / len(cases)
            line = {
                "passages": passages,
                "kind": kind,
                "hops": hops,
                "questions": len(cases),
                "exact_match": round(share, 4),
            }
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
