"""The classifier of words: what the base does not foresee has to stay."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ragcache_papers.llmlingua2 import Compressor
from tools.mini import compressor
from tools.mini.evaluate import MINI_BASE

TEXT = "# Chess Club Robin\n\nThe Chess Club Robin was founded in 1910. The Chess Club Robin has met on Wednesdays.\n"


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    out = tmp_path_factory.mktemp("classifier")
    return out, compressor.train(out, steps=25, seed=0)


@pytest.mark.slow
def test_it_learns_its_labels_and_ingestion_takes_it(classifier):
    out, right = classifier
    assert right > 0.65
    shorter = Compressor(str(out), 0.5).compress(TEXT)
    assert len(shorter) < 0.7 * len(TEXT)
    assert "1910" in shorter


@torch.no_grad()
def test_labels_are_surprisal_above_the_median_of_the_passage():
    """Token by token, one passage at a time."""
    tokenizer = AutoTokenizer.from_pretrained(MINI_BASE)
    base = AutoModelForCausalLM.from_pretrained(MINI_BASE, dtype=torch.float32).eval()
    texts = [TEXT, "The Dance Circle Walnut always meets on Sundays.\n"]
    batch = tokenizer(texts, return_tensors="pt", padding=True)
    labels = compressor._labels(base, batch)
    for row, ids, known in zip(
        labels.tolist(), batch["input_ids"].tolist(), batch["attention_mask"].tolist(), strict=True
    ):
        places = [place for place, one in enumerate(known) if one]
        own = [ids[place] for place in places]
        logits = base(input_ids=torch.tensor([own])).logits[0].double()
        surprisal = []
        for place in range(1, len(own)):
            top = float(logits[place - 1].max())
            total = sum(math.exp(float(one) - top) for one in logits[place - 1])
            surprisal.append(math.log(total) + top - float(logits[place - 1][own[place]]))
        middle = sorted(surprisal)[(len(surprisal) - 1) // 2]
        assert [row[place] for place in places[1:]] == [int(one > middle) for one in surprisal]
        assert {row[place] for place in range(len(row)) if place not in places[1:]} <= {compressor.IGNORED}
