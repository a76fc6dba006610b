"""Values that LangChain's components refuse, and the messages."""

import pytest
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.messages import ChatMessage, FunctionMessage, HumanMessage
from langchain_core.messages.content import create_image_block, create_text_block
from pydantic import BaseModel, ValidationError

import ragcache as rc
from langchain_ragcache import (
    ChatRagCache,
    LangChainEmbedder,
    RagCacheEmbeddings,
    RagCacheRetriever,
    RagCacheVectorStore,
    open_kb,
)
from ragcache.errors import ConfigError, EmbedderError, FilterError, ModelMismatchError, PromptError, UnknownHandleError
from ragcache_demo.bag_of_words import BagOfWords

IMAGE = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}
AUDIO = {"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}}
TWO = [Document(page_content="one"), Document(page_content="two")]


class Place(BaseModel):
    year: int


@pytest.fixture(scope="module")
def kb(tmp_path_factory, lm):
    with rc.RagCache.open(tmp_path_factory.mktemp("refusing") / "kb", model=lm, embedder=BagOfWords()) as kb:
        kb.ingest(rc.Document("a", "The cat sat.", {"year": 1}))
        yield kb


def asked(*content, **options):
    """Return a call of the chat model with this content, or these messages."""
    messages = [one for one in content if not isinstance(one, str | dict)] or [HumanMessage(list(content))]
    return lambda kb: ChatRagCache(kb=kb).invoke(messages, **options)


def passage(text="one", **about):
    return create_text_block(text, ragcache=about)


def adding(**options):
    return lambda kb: RagCacheVectorStore(kb).add_documents(TWO, **options)


def search(**options):
    return lambda kb: RagCacheVectorStore(kb).similarity_search("cat", **options)


def find(**options):
    return lambda kb: RagCacheRetriever(kb=kb).invoke("cat", **options)


def opened(component, **options):
    """Return a call that makes a component of the open store."""
    return lambda kb: component(kb=kb, **options)


def structured(*schema, **options):
    return lambda kb: ChatRagCache(kb=kb).with_structured_output(*schema, **options)


REFUSALS = [
    (asked(create_image_block(url="https://example.com/a.png"), "Who?"), PromptError, "image"),
    (asked(IMAGE), PromptError, "'image_url' cannot be read"),
    (asked(AUDIO), PromptError, "audio"),
    (asked({"type": "text", "text": None}), PromptError, "text"),
    (asked(create_text_block("one", ragcache="handle")), PromptError, "handle"),
    (asked(passage(block="x")), PromptError, "block"),
    (asked(passage(handle=7)), PromptError, "the handle is a string"),
    (asked(passage(metadata=7)), PromptError, "metadata is an object"),
    (asked(HumanMessage("Who?"), FunctionMessage("result", name="find")), PromptError, "FunctionMessage"),
    (asked(HumanMessage("Who?"), ChatMessage(role="narrator", content="Once")), PromptError, "narrator"),
    (asked(HumanMessage("")), PromptError, "empty"),
    (asked(passage("", handle="f" * 64), "?"), UnknownHandleError, "ffffffff"),
    (asked("Who?", n_predict=3), ConfigError, "ChatRagCache does not take n_predict"),
    (asked("Who?", functions=[]), ConfigError, "functions"),
    (asked("Who?", timeout_s=3), ConfigError, "does not take timeout_s"),
    (asked("Who?", temperature=-1), ConfigError, "temperature"),
    (asked("Who?", model="gpt-5"), ModelMismatchError, "'gpt-5'"),
    (lambda kb: ChatRagCache(kb=kb).bind_tools([Place]).invoke("Who?"), ConfigError, "shows no tools"),
    (asked("Who?", json_schema={"type": "strange"}), ConfigError, "cannot be compiled"),
    (opened(ChatRagCache, n_predict=3), ValidationError, "n_predict"),
    (opened(ChatRagCache, temperature=-1), ValidationError, "temperature"),
    (opened(ChatRagCache, model="gpt-5"), ModelMismatchError, "'gpt-5'"),
    (structured(), ConfigError, "needs a schema"),
    (structured(Place, tools=[]), ConfigError, "does not take tools"),
    (find(top_k=3), ConfigError, "the retriever does not take top_k"),
    (find(filter={"color": "red"}), FilterError, "color"),
    (opened(RagCacheRetriever, search_kwargs={"k": 3}), ValidationError, "search_kwargs"),
    (lambda _: RagCacheRetriever(), ValidationError, "RAGCACHE_STORE"),
    (lambda _: RagCacheVectorStore(), ConfigError, "RAGCACHE_STORE"),
    (lambda _: open_kb(7), ConfigError, "kb is 7"),
    (adding(ids=["a"]), ConfigError, "ids: 2 documents need one id each"),
    (adding(ids="ab"), ConfigError, "ids: 2 documents"),
    (adding(ids=["a", "b", "c"]), ConfigError, "ids: 2 documents"),
    (adding(ids=["a", 7]), ConfigError, "ids: 7 is no string"),
    (adding(namespace="x"), ConfigError, "add_documents does not take namespace"),
    (lambda kb: RagCacheVectorStore(kb).delete(["a"], namespace="x"), ConfigError, "delete does not take namespace"),
    (search(where={"a": 1}), ConfigError, "the search does not take where"),
    (search(filter=["line"]), FilterError, "filter"),
    (opened(RagCacheVectorStore, embedding=DeterministicFakeEmbedding(size=6)), ConfigError, "embedder"),
    (opened(RagCacheVectorStore, model="mini"), ConfigError, "model"),
    (opened(RagCacheEmbeddings, embedder=BagOfWords()), ConfigError, "not both"),
    (lambda _: LangChainEmbedder("text-embedding-3-small"), EmbedderError, "Embeddings are expected"),
]


@pytest.mark.parametrize(("call", "error", "words"), REFUSALS)
def test_bad_input_is_refused_by_name(kb, monkeypatch, call, error, words):
    monkeypatch.delenv("RAGCACHE_STORE", raising=False)
    with pytest.raises(error, match=words):
        call(kb)
    assert [document.id for document in kb.documents()] == ["a"]


async def test_a_stream_refuses_as_a_call_does(kb):
    with pytest.raises(PromptError, match="'image_url' cannot be read"):
        [chunk async for chunk in ChatRagCache(kb=kb).astream([HumanMessage([IMAGE])])]


def test_a_method_of_the_environment_is_checked(tmp_path, monkeypatch):
    monkeypatch.setenv("RAGCACHE_STORE", str(tmp_path / "new"))
    monkeypatch.setenv("RAGCACHE_METHOD", "unheard-of")
    with pytest.raises(ValidationError, match="unheard-of"):
        RagCacheRetriever()
