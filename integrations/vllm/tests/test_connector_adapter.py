"""A store whose model is an adapter: vLLM over the merged checkpoint against the embedded engine."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import ragcache as rc
from ragcache.models.adapter import Base, write_adapter
from ragcache.models.checkpoint_digest import checkpoint_digest
from ragcache.models.hub import resolve
from ragcache.models.trained_tokens import TrainedTokens
from ragcache_demo.bag_of_words import BagOfWords

pytest.importorskip("vllm", reason="runs in vLLM's own environment")

from served import serving

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]
EXAMPLES = Path(__file__).parents[3] / "examples"
LINES = (EXAMPLES / "corpus_questions.jsonl").read_text(encoding="utf-8").splitlines()
QUESTIONS = [json.loads(line)["question"] for line in LINES[::40]]


def save_adapter(directory: Path) -> None:
    """Link tokens and a packet beside mini-base, their rows near those of words."""
    lm = rc.load_lm("mini-base")
    first = len(lm.tokenizer)
    links = TrainedTokens("link", "isolated", 2, 8, first, first + 16, first + 17)
    spec = replace(links, first_packet_id=first + 18, header_tokens=3, trailer_tokens=2)
    names = [f"<|row-{number}|>" for number in range(len(spec.added_ids))]
    lm.tokenizer.add_special_tokens({"additional_special_tokens": names})
    lm.tokenizer.save_pretrained(directory)
    table = lm.model.get_input_embeddings().weight
    noise = torch.Generator().manual_seed(0)
    rows = {id: table[id - first + 40] + 0.01 * torch.randn(256, generator=noise) for id in spec.added_ids}
    digest, layers = str(checkpoint_digest(resolve("mini-base"))), lm.config.num_hidden_layers
    base = Base("mini-base", digest, layers, 256, lm.config.vocab_size, first + len(names))
    write_adapter(directory, base, spec, rows)


def test_answers_are_those_of_the_embedded_engine(tmp_path):
    save_adapter(tmp_path / "adapter")
    with rc.RagCache.open(tmp_path / "kb", model=tmp_path / "adapter", embedder=BagOfWords()) as here:
        assert not here.ingest([EXAMPLES / "corpus"]).failed
        expected = [here.ask(question, k=4) for question in QUESTIONS]
    with (
        serving(tmp_path / "kb", tmp_path / "vllm.txt") as engine,
        rc.RagCache.open(tmp_path / "kb", engine=engine, embedder=BagOfWords()) as front,
    ):
        for question, wanted in zip(QUESTIONS, expected, strict=True):
            answer = front.ask(question, k=4)
            assert (answer.text, answer.method) == (wanted.text, "link"), question
            assert answer.usage.prompt_tokens == wanted.usage.prompt_tokens
            assert answer.usage.cached_tokens > answer.usage.prompt_tokens / 2
