"""Retrievers of others that raise, return strings or nothing, duplicates, nodes without ids, and single tokens."""

import pytest
from li_texts import QUESTION, SHORT
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.retrievers import BaseRetriever
from llama_index.core.schema import NodeWithScore, TextNode

import ragcache as rc
from llama_index.response_synthesizers.ragcache import FusedSynthesizer
from ragcache.errors import PromptError


class Found(BaseRetriever):
    """Returns what the test says, or raises it."""

    def __init__(self, found):
        super().__init__()
        self._found = found

    def _retrieve(self, query_bundle):
        if isinstance(self._found, Exception):
            raise self._found
        return self._found


def node(text, **more):
    return NodeWithScore(node=TextNode(text=text, **more))


CAT, DOG = node("The cat sat on the mat.", id_="cat"), node("The dog ran off.")


def query(llm, found):
    return RetrieverQueryEngine(Found(found), FusedSynthesizer(llm)).query(QUESTION)


def test_an_error_of_the_retriever_is_the_callers_and_the_next_question_is_answered(llm):
    with pytest.raises(RuntimeError, match="the index is away"):
        query(llm, RuntimeError("the index is away"))
    assert query(llm, [CAT]).response


@pytest.mark.parametrize("found", [["The cat sat."], [CAT, "The dog ran."], [CAT, None]])
def test_what_is_no_node_is_refused(llm, found):
    with pytest.raises(PromptError, match="in place of a node"):
        FusedSynthesizer(llm).synthesize(QUESTION, found)


@pytest.mark.parametrize("found", [[CAT, CAT, CAT], [DOG, DOG], [node("a"), node("b"), node("a")], [CAT, DOG]])
def test_duplicates_nodes_without_ids_and_single_tokens_are_read_as_they_come(kb, llm, found):
    """Its synthesizer's; a retriever of LlamaIndex itself leaves out nodes of the same text."""
    response = FusedSynthesizer(llm).synthesize(QUESTION, found)
    passages = [rc.Passage(one.get_content()) for one in found]
    own = kb.chat([{"role": "user", "content": QUESTION}], passages=passages, sampling=rc.Sampling(**SHORT))
    assert (response.response, len(response.source_nodes)) == (own.text, len(found))
    assert len(own.hits) == len(found)
