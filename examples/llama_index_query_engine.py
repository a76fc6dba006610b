"""A LlamaIndex query engine whose model reads each passage once, at ingestion, and only the question afterwards.

python examples/llama_index_query_engine.py [DIRECTORY OF THE STORE]
"""

import sys
import tempfile
from pathlib import Path

from llama_index.core.query_engine import RetrieverQueryEngine

import ragcache as rc
from llama_index.llms.ragcache import RagCacheLLM
from llama_index.response_synthesizers.ragcache import FusedSynthesizer
from llama_index.retrievers.ragcache import RagCacheRetriever

CORPUS = Path(__file__).parent / "corpus"
QUESTIONS = ["What town does Petra Elley live in?", "Which river flows past the town that is home to Petra Elley?"]


def main(directory: str) -> None:
    with rc.RagCache.open(directory) as kb:
        kb.ingest([CORPUS])
        engine = RetrieverQueryEngine(RagCacheRetriever(kb, k=4), FusedSynthesizer(RagCacheLLM(kb), streaming=True))
        for question in QUESTIONS:
            response = engine.query(question)
            print(question, "->", "".join(response.response_gen))
            for source in response.source_nodes:
                print(f"  {source.score:.2f} {source.metadata['title']}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as directory:
            main(directory)
