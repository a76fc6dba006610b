"""Retrievers of others that raise, return strings, duplicates, documents without ids, and passages of one token."""

import pytest
from langchain_core.documents import Document
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableLambda

import ragcache as rc
from langchain_ragcache import ChatRagCache, create_fused_documents_chain, create_fused_retrieval_chain
from ragcache.errors import PromptError
from ragcache_demo.bag_of_words import BagOfWords

PROMPT = ChatPromptTemplate.from_messages([("human", "{context}Question: {input}")])
CAT, DOG = Document("The cat sat on the mat.", id="cat"), Document("The dog ran off.")
ASKED = {"input": "Who sat?"}


@pytest.fixture
def kb(tmp_path, tiny) -> rc.RagCache:
    with rc.RagCache.open(tmp_path / "kb", model=tiny, method="reposition", embedder=BagOfWords()) as kb:
        yield kb


def chain(kb, find):
    model = ChatRagCache(kb=kb, max_tokens=4)
    return create_fused_retrieval_chain(RunnableLambda(find), create_fused_documents_chain(model, PROMPT))


def test_an_error_of_the_retriever_is_the_callers_and_the_next_question_is_answered(kb):
    def fail(_):
        raise RuntimeError("the index is away")

    with pytest.raises(RuntimeError, match="the index is away"):
        chain(kb, fail).invoke(ASKED)
    assert chain(kb, lambda _: [CAT]).invoke(ASKED)["answer"]


@pytest.mark.parametrize("found", [["The cat sat."], "The cat sat.", None, 3, [CAT, "The dog ran."]])
def test_what_is_no_document_is_refused(kb, found):
    with pytest.raises(PromptError, match="the input has no documents"):
        chain(kb, lambda _: found).invoke(ASKED)


@pytest.mark.parametrize(
    "found", [[CAT, CAT, CAT], [DOG, DOG], [Document("a"), Document("b"), Document("a")], [CAT, DOG]]
)
def test_duplicates_documents_without_ids_and_single_tokens_are_read_as_they_come(kb, found):
    answer = chain(kb, lambda _: found).invoke(ASKED)["answer"]
    passages = [rc.Passage(document.page_content) for document in found]
    own = kb.chat([{"role": "user", "content": [*passages, "Question: Who sat?"]}], sampling=rc.Sampling(4))
    assert answer == own.text
    assert len(own.hits) == len(found)
