"""The classifier of words: what the base does not on_candidates has to stay."""

import json
import math

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ragcache_papers.llmlingua2 import Compressor
from tools import compress_rows
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


class Halves:
    """Leaves every other word."""

    def compress(self, text: str) -> str:
        return " ".join(text.split()[1::2])


def test_rows_of_training_keep_all_but_words_of_their_passages(tmp_path, monkeypatch):
    rows = [
        {
            "type": "qa",
            "passages": ["a b c d", {"title": "T", "text": "e f"}, "g"],
            "question": "h i?",
            "answer": "j k",
        },
        {"type": "text", "text": "l m"},
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n", encoding="utf-8")
    made = []
    monkeypatch.setattr(compress_rows, "Compressor", lambda *given: made.append(given) or Halves())
    out = ["--compress", "DIR", "--compress-keep", "0.3", "--out", str(tmp_path / "out.jsonl")]
    compress_rows.main([str(tmp_path / "rows.jsonl"), *out])
    found = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines()]
    assert made == [("DIR", 0.3)]
    assert found == [{**rows[0], "passages": ["b d", {"title": "T", "text": "f"}, "g"]}, rows[1]]
