"""Values that LlamaIndex's components refuse, and the messages."""

import pickle

import pytest
from li_texts import QUESTION, TEXTS
from llama_index.core.base.llms.types import ChatMessage, ImageBlock, TextBlock
from llama_index.core.embeddings import MockEmbedding
from llama_index.core.llms import MockLLM
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.prompts import ChatPromptTemplate, PromptTemplate
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from llama_index.core.vector_stores import SimpleVectorStore, types
from waiting import in_own_loop

import ragcache as rc
from llama_index.chat_engine.ragcache import RagCacheChatEngine
from llama_index.embeddings.ragcache import RagCacheEmbedding
from llama_index.ingestion.ragcache import RagCachePrecompute
from llama_index.llms.ragcache import PassageBlock, RagCacheLLM
from llama_index.response_synthesizers.ragcache import FusedSynthesizer
from llama_index.retrievers.ragcache import RagCacheRetriever
from llama_index.vector_stores.ragcache import RagCacheVectorStore
from ragcache.errors import (
    ConfigError,
    ContextTooLongError,
    EmbedderMismatchError,
    FilterError,
    IngestError,
    MetadataError,
    PromptError,
    StoreBusyError,
    TimedOutError,
    UnknownHandleError,
)
from ragcache_demo.bag_of_words import BagOfWords

CAT = NodeWithScore(node=TextNode(id_="cat", text="The cat sat on the mat."))
IMAGE = ChatMessage(blocks=[ImageBlock(url="http://localhost/a.png")])
BETWEEN = [PassageBlock(text="a"), TextBlock(text="and"), PassageBlock(text="b"), TextBlock(text="?")]
GOOD = TextNode(id_="good", text="Good.")
SOME = BagOfWords().embed_query("x").tolist()


@pytest.fixture(scope="module")
def kb(lm, tmp_path_factory):
    path = tmp_path_factory.mktemp("refusing") / "kb"
    with rc.RagCache.open(path, model=lm, embedder=BagOfWords(), method="reposition") as kb:
        kb.ingest(rc.Document(id, text, {"year": 2020}) for id, text in TEXTS.items())
        yield kb


def chat(*messages, **options):
    return lambda kb: RagCacheLLM(kb, max_tokens=2).chat(list(messages) or [ChatMessage(QUESTION)], **options)


def llm(**fields):
    return lambda kb: RagCacheLLM(kb, **fields)


def retrieve(question=QUESTION, **options):
    return lambda kb: RagCacheRetriever(kb, **options).retrieve(question)


def where(operator: str, value=("a",), key: str = "year") -> types.MetadataFilters:
    value = list(value) if isinstance(value, tuple) else value
    return types.MetadataFilters(
        filters=[types.MetadataFilter(key=key, value=value, operator=types.FilterOperator(operator))]
    )


def query(mode="default", *, kwargs=None, **fields):
    asked = {"query_embedding": SOME, "mode": types.VectorStoreQueryMode(mode), **fields}
    return lambda kb: RagCacheVectorStore(kb).query(types.VectorStoreQuery(**asked), **(kwargs or {}))


def add(*nodes, **fields):
    """Return a call that adds a good node, and then these nodes or a node with these fields."""
    made = nodes or [TextNode(**{"id_": "n", "text": "Text.", **fields})]
    return lambda kb: RagCacheVectorStore(kb).add([GOOD, *made])


def embedded(dimension: int) -> list[TextNode]:
    return MockEmbedding(embed_dim=dimension)([TextNode(id_="n", text="Text.")])


def template(made):
    return lambda kb: FusedSynthesizer(RagCacheLLM(kb), text_qa_template=made)


def synthesize(*found):
    return lambda kb: FusedSynthesizer(RagCacheLLM(kb)).synthesize(QUESTION, list(found))


def talk(**options):
    def make(kb):
        memory = ChatMemoryBuffer.from_defaults(tokenizer_fn=str.split)
        options.setdefault("llm", RagCacheLLM(kb))
        return RagCacheChatEngine.from_defaults(RagCacheRetriever(kb), **{"memory": memory, **options})

    return make


def pickled(component):
    return lambda kb: pickle.dumps(component(kb))


def busy(call):
    """Return the call while another writer holds the store."""

    def run(kb):
        with (
            rc.RagCache.open(kb.store.layout.root, model=kb.lm, embedder=BagOfWords()) as other,
            other.store.layout.writer(1.0),
        ):
            call(kb)

    return run


REFUSALS = [
    (chat(segments=["a", 7]), PromptError, "7 is no segment"),
    (chat(segments=[{"body": "a"}]), PromptError, "no segment"),
    (chat(segments=[{}]), PromptError, "no segment"),
    (chat(segments="a text"), PromptError, "give a list"),
    (chat(segments=[" "]), PromptError, "no text"),
    (chat(segments=[{"handle": "f" * 64}]), UnknownHandleError, "send the text"),
    (chat(segments=[{"id": "nobody"}]), UnknownHandleError, "nobody"),
    (chat(segments=["word " * 200]), ContextTooLongError, "512"),
    (chat(segments=["The cat sat."], context="keep"), ConfigError, 'context="keep" takes passages in the messages'),
    (chat(ChatMessage("a"), ChatMessage("x", role="function")), PromptError, "message 1 has the role 'function'"),
    (chat(IMAGE), PromptError, "message 0 holds a block of type 'image'"),
    (chat(ChatMessage("x", role="system")), PromptError, "no user message"),
    (chat(ChatMessage(blocks=BETWEEN), method="a3"), PromptError, "between two passages"),
    (chat(functions=[]), ConfigError, "no option 'functions'"),
    (chat(method="telepathy"), ConfigError, "telepathy"),
    (chat(order="random"), ConfigError, "order 'random' is unknown"),
    (chat(context="forget"), ConfigError, "context 'forget' is unknown"),
    (chat(timeout_s=1e-6), TimedOutError, "no answer within 1e-06 s"),
    (lambda kb: RagCacheLLM(kb).complete("Hi", context="keep"), ConfigError, "no option 'context'"),
    (llm(api_key="x"), ConfigError, "'api_key'"),
    (llm(temperature=-1.0), ConfigError, "temperature"),
    (chat(timeout_s=0), ConfigError, "timeout_s is 0"),
    (retrieve("  "), PromptError, "empty"),
    (retrieve(k=0), ConfigError, "k is 0"),
    (retrieve(QueryBundle("x", embedding=[0.1, 0.2])), EmbedderMismatchError, "the query embedding has 2 dimensions"),
    (retrieve(filters={"colour": "red"}), FilterError, "colour"),
    (retrieve(filters=where("text_match", "2")), FilterError, "'year': operator 'text_match' is not supported"),
    (retrieve(filters=where("text_match_insensitive")), FilterError, "'text_match_insensitive' is not supported"),
    (retrieve(filters=where("is_empty")), FilterError, "'is_empty' is not supported"),
    (retrieve(filters=where("any", "a", "tags")), FilterError, "'tags': 'any' takes a list"),
    (retrieve(filters=where("all", "a", "tags")), FilterError, "'tags': 'all' takes a list"),
    (retrieve(filters=where("==")), FilterError, "year"),
    (query("svm"), ConfigError, "'svm' is not supported"),
    (query("hybrid"), ConfigError, "'hybrid' searches for words; give the query a query_str"),
    (query("text_search"), ConfigError, "'text_search' searches for words"),
    (query(query_embedding=None), ConfigError, "neither query_embedding nor query_str"),
    (query(query_embedding=[0.1, 0.2, 0.3]), EmbedderMismatchError, "the query embedding has 3"),
    (query("mmr", kwargs={"mmr_prefetch_k": 2, "mmr_prefetch_factor": 2.0}), ConfigError, "give one of them"),
    (lambda kb: RagCacheVectorStore(kb).delete_nodes(), ConfigError, "to delete everything, use clear"),
    (add(*embedded(7)), EmbedderMismatchError, "7 dimensions.*'bag-of-words' makes 24"),
    (add(*embedded(24)), EmbedderMismatchError, "made by another model"),
    (add(metadata={"when": {1, 2}}), MetadataError, "set"),
    (add(metadata={"when": float("nan")}), MetadataError, "n:"),
    (add(metadata={"_node_id": "x"}), MetadataError, "'_node_id' is used by the store"),
    (add(id_=""), IngestError, "no id"),
    (add(metadata={"a": 1}, text_template="{content} ({metadata_str})"), ConfigError, "text_template"),
    (busy(lambda kb: RagCacheVectorStore(kb, timeout_s=0.1).add([GOOD])), StoreBusyError, "writ"),
    (busy(lambda kb: in_own_loop(RagCacheVectorStore(kb, timeout_s=0.1).async_add([GOOD]))), StoreBusyError, "writ"),
    (template(PromptTemplate("Asked: {query_str}")), ConfigError, "0 places for the passages"),
    (template(PromptTemplate("{context_str} {context_str} {query_str}")), ConfigError, "2 places for the passages"),
    (template(PromptTemplate("Read {context_str}")), ConfigError, "no place for the question"),
    (template(ChatPromptTemplate([ChatMessage("{query_str}")])), ConfigError, "0 places for the passages"),
    (lambda _: FusedSynthesizer(MockLLM()), ConfigError, "MockLLM"),
    (synthesize("The cat sat."), PromptError, "gave a str in place of a node, as number 0"),
    (synthesize(CAT, "The dog ran."), PromptError, "in place of a node, as number 1"),
    (synthesize(CAT, None), PromptError, "gave a NoneType in place of a node"),
    (talk(context_template="Know everything."), ConfigError, "0 places for the passages"),
    (talk(context_refine_template="{context_msg}"), ConfigError, "context_refine_template"),
    (talk(system_prompt="a", prefix_messages=[ChatMessage("b")]), ConfigError, "not both"),
    (talk(llm=MockLLM()), ConfigError, "MockLLM"),
    (talk(llm=MockLLM(), memory=None), ConfigError, "MockLLM"),
    (pickled(RagCacheLLM), ConfigError, "pickled"),
    (pickled(RagCacheVectorStore), ConfigError, "from_path"),
    (pickled(RagCacheEmbedding), ConfigError, "num_workers=None"),
    (pickled(RagCachePrecompute), ConfigError, "num_workers=None"),
    (lambda kb: kb.precompute(SimpleVectorStore()), ConfigError, "does not say which nodes it holds"),
    (lambda kb: rc.attach(SimpleVectorStore(), kb, mode="x"), ConfigError, "only metadata_mode"),
    (lambda kb: rc.attach(TextNode(text="x"), kb), ConfigError, "TextNode cannot be attached"),
]


@pytest.mark.parametrize(("call", "error", "words"), REFUSALS)
def test_bad_input_is_refused_by_name(kb, call, error, words):
    with pytest.raises(error, match=words):
        call(kb)
    assert {document.id for document in kb.documents()} == set(TEXTS)


async def test_asynchronous_calls_refuse_as_others_do(kb):
    model, asked = RagCacheLLM(kb), [ChatMessage(QUESTION)]
    with pytest.raises(PromptError, match="no segment"):
        await model.achat(asked, segments=[7])
    stream = await model.astream_chat(asked, segments=[{"id": "nobody"}])
    with pytest.raises(UnknownHandleError):
        [piece async for piece in stream]
