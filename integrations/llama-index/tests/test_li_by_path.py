"""Components that are given a path share an open store."""

import pytest
from li_texts import QUESTION, SHORT, TEXTS
from llama_index.core.llms import ChatMessage
from tiny_model import save_tiny_llama

import ragcache as rc
from llama_index.embeddings.ragcache import RagCacheEmbedding
from llama_index.ingestion.ragcache import RagCachePrecompute
from llama_index.llms.ragcache import RagCacheLLM
from llama_index.retrievers.ragcache import RagCacheRetriever
from llama_index.vector_stores.ragcache import RagCacheVectorStore
from ragcache.errors import ConfigError
from ragcache_demo.bag_of_words import BagOfWords


def test_one_store_for_all_of_a_path(tmp_path):
    directory = save_tiny_llama(tmp_path / "model")
    path = tmp_path / "kb"
    with rc.open_shared(path, model=directory, embedder=BagOfWords()) as kb:
        kb.ingest(rc.Document(id, text) for id, text in TEXTS.items())
        llm = RagCacheLLM(path, model=str(directory), **SHORT)
        assert llm.kb is kb
        assert RagCacheRetriever(str(path), k=2).retrieve(QUESTION)[0].node_id in [f"{id}#0" for id in TEXTS]
        assert RagCacheVectorStore(path).client is kb
        assert RagCacheEmbedding(path).model_name == kb.embedder.name
        assert RagCachePrecompute(path).fingerprint == kb.lm.fingerprint
        assert (
            llm.chat([ChatMessage(QUESTION)]).message.content
            == RagCacheLLM(kb, **SHORT).chat([ChatMessage(QUESTION)]).message.content
        )
        with pytest.raises(ConfigError, match="store that is open"):
            RagCacheLLM(kb, model="mini")
