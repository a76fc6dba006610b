"""A store whose model is an adapter: vLLM over the merged checkpoint against the embedded engine."""

from pathlib import Path

import pytest
import torch

import ragcache as rc
from ragcache.models.hub import resolve
from ragcache.models.trained_tokens import TrainedTokens
from ragcache_demo.bag_of_words import BagOfWords
from tests.adapters import save_adapter

pytest.importorskip("vllm", reason="runs in vLLM's own environment")

from served import EXAMPLES, QUESTIONS, serving

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]


def save_links(directory: Path) -> None:
    """Link tokens beside mini-base, their rows near those of words."""
    lm = rc.load_lm("mini-base")
    first = len(lm.tokenizer)
    spec = TrainedTokens("link", "isolated", 2, 8, first, first + 16, first + 17)
    table = lm.model.get_input_embeddings().weight
    noise = torch.Generator().manual_seed(0)
    rows = {id: table[id - first + 40] + 0.01 * torch.randn(256, generator=noise) for id in spec.added_ids}
    save_adapter(directory, Path(resolve("mini-base")), spec, rows=rows)


def test_answers_are_those_of_the_embedded_engine(tmp_path):
    save_links(tmp_path / "adapter")
    with rc.RagCache.open(tmp_path / "kb", model=tmp_path / "adapter", embedder=BagOfWords()) as here:
        assert not here.ingest([EXAMPLES / "corpus"]).failed
        expected = [here.ask(question, k=4) for question in QUESTIONS[::40]]
    with (
        serving(tmp_path / "kb", tmp_path / "vllm.txt") as engine,
        rc.RagCache.open(tmp_path / "kb", engine=engine, embedder=BagOfWords()) as front,
    ):
        for question, wanted in zip(QUESTIONS[::40], expected, strict=True):
            answer = front.ask(question, k=4)
            assert (answer.text, answer.method) == (wanted.text, "link"), question
            assert answer.usage.prompt_tokens == wanted.usage.prompt_tokens
            assert answer.usage.cached_tokens > answer.usage.prompt_tokens / 2
