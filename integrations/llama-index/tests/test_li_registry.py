"""The bundled model over part of the example corpus: right answers through stock LlamaIndex, and only suffix and link
tokens are computed.
"""

import json
import runpy
from pathlib import Path

import pytest
from llama_index.core.query_engine import RetrieverQueryEngine

import ragcache as rc
from llama_index.llms.ragcache import RagCacheLLM
from llama_index.response_synthesizers.ragcache import FusedSynthesizer
from llama_index.retrievers.ragcache import RagCacheRetriever
from ragcache.engine.verdict import TRAINED

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
SAMPLING = rc.Sampling(max_tokens=48)
K = 4

pytestmark = pytest.mark.skipif(
    not (EXAMPLES.parent / "ragcache" / "mini" / "config.json").is_file(), reason="the bundled mini model is not here"
)


@pytest.fixture(scope="module")
def kb(tmp_path_factory):
    with rc.RagCache.open(tmp_path_factory.mktemp("registry") / "kb") as kb:
        kb.ingest({EXAMPLES / "corpus" / source for row in questions(20) for source in row["sources"]})
        yield kb


@pytest.fixture
def llm(kb) -> RagCacheLLM:
    return RagCacheLLM(kb, max_tokens=SAMPLING.max_tokens)


def questions(count: int) -> list[dict[str, str]]:
    lines = (EXAMPLES / "corpus_questions.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines[:count]]


def test_a_query_engine_answers_as_the_engine_does_and_runs_suffix_and_link_tokens(kb, llm, recorder):
    engine = RetrieverQueryEngine(RagCacheRetriever(kb, k=K), FusedSynthesizer(llm))
    engine.query("Who?")  # computes the prefix, once for all
    right = 0
    for row in questions(4):
        recorder.events.clear()
        response = engine.query(row["question"])
        own = kb.ask(row["question"], k=K, sampling=SAMPLING)
        assert response.response == own.text
        assert [node.node_id for node in response.source_nodes] == [hit.chunk.id for hit in own.hits]
        [answer] = recorder.answers()
        usage = answer["usage"]
        assert usage["computed_tokens"] == suffix_tokens(kb, row["question"]) + link_tokens()
        assert usage["cached_tokens"] >= sum(hit.chunk.num_tokens for hit in own.hits)
        assert usage["prompt_tokens"] == usage["computed_tokens"] + usage["cached_tokens"]
        assert answer["method"] == kb.method == "link"
        assert answer["method_reason"] == own.method_reason == TRAINED
        right += response.response.strip() == row["answer"]
    assert right >= 3  # other people have similar names, so retrieval misses some


def suffix_tokens(kb: rc.RagCache, question: str) -> int:
    """Return the number of tokens after the passages, by the bundled model's chat template, written out."""
    return len(kb.lm.tokenizer(f"Question: {question}\nAnswer:", add_special_tokens=False)["input_ids"])


def link_tokens() -> int:
    """Return the number of link tokens after K passages, plus one for the token that ends the passages."""
    config = EXAMPLES.parent / "ragcache" / "mini" / "config.json"
    return K * int(json.loads(config.read_text(encoding="utf-8"))["ragcache"]["link_tokens"]) + 1


@pytest.mark.slow
def test_the_example_runs(tmp_path, capsys):
    runpy.run_path(str(EXAMPLES / "llama_index_query_engine.py"))["main"](str(tmp_path / "kb"))
    said = capsys.readouterr().out
    assert "Petra Elley now lives in East Thornbury." in said
    assert "which lies on the Wild Sema." in said
