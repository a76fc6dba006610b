"""A stock query engine gives the engine's own answers, and its model reads only the question."""

import pytest
from li_texts import QUESTION, SHORT
from llama_index.core import PromptHelper, Settings, get_response_synthesizer
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.base.response.schema import AsyncStreamingResponse, Response, StreamingResponse
from llama_index.core.callbacks import CallbackManager, CBEventType, LlamaDebugHandler
from llama_index.core.postprocessor import SimilarityPostprocessor
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.prompts import ChatPromptTemplate, PromptTemplate, RichPromptTemplate
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.schema import MetadataMode

import ragcache as rc
from llama_index.response_synthesizers.ragcache import FusedSynthesizer
from llama_index.retrievers.ragcache import RagCacheRetriever
from llama_index.vector_stores.ragcache import HANDLE_KEY
from ragcache.errors import ConfigError

SAMPLING = rc.Sampling(**SHORT)
CHAT_TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</{{ m['role'] }}>{% endfor %}<assistant>"


@pytest.fixture
def engine(kb, llm):
    """Return a function that makes a stock query engine over the store."""

    def make(*, k: int = 3, postprocessors=(), **options) -> RetrieverQueryEngine:
        synthesizer = FusedSynthesizer(llm, **options)
        return RetrieverQueryEngine(RagCacheRetriever(kb, k=k), synthesizer, list(postprocessors))

    return make


@pytest.fixture
def chat_template(lm):
    lm.tokenizer.chat_template = CHAT_TEMPLATE
    yield
    lm.tokenizer.chat_template = None


class Shout(BaseNodePostprocessor):
    """A postprocessor that changes the nodes' text, and nothing else."""

    def _postprocess_nodes(self, nodes, query_bundle=None):
        for node in nodes:
            node.node.set_content(node.node.get_content().upper())
        return nodes


# Answers


def test_answers_are_the_engines(kb, engine):
    response = engine().query(QUESTION)
    assert isinstance(response, Response)
    assert response.response == kb.ask(QUESTION, k=3, sampling=SAMPLING).text
    hits = kb.retrieve(QUESTION, k=3)
    chat = kb.chat([{"role": "user", "content": QUESTION}], passages=hits, sampling=SAMPLING)
    assert response.response == chat.text
    assert [node.node_id for node in response.source_nodes] == [hit.chunk.id for hit in hits]
    assert [node.score for node in response.source_nodes] == [hit.score for hit in hits]
    assert set(response.metadata) == {hit.chunk.id for hit in hits}


def test_a_stock_synthesizer_is_told_what_keeps_passages_apart(llm, engine, caplog):
    """The method cannot read the text between passages."""
    llm.max_tokens, llm.method = 1, "a3"
    with caplog.at_level("WARNING", "ragcache"):
        engine().query(QUESTION)
        assert "plain text" not in caplog.text
        room = PromptHelper(context_window=2048, num_output=1)  # by a tokenizer that is not this model's
        joining = get_response_synthesizer(llm=llm, prompt_helper=room)
        stock = RetrieverQueryEngine(engine().retriever, joining)
        stock.query(QUESTION)
        stock.query(QUESTION)
    said = [record.getMessage() for record in caplog.records if record.name.startswith("ragcache")]
    assert ["FusedSynthesizer" in text for text in said if "nobody checked" not in text] == [True]


TEMPLATE = PromptTemplate("Context:\n{context_str}\nAsked: {query_str}\nSaid:")


@pytest.mark.parametrize("options", [{}, {"text_qa_template": TEMPLATE}])
def test_streaming_is_non_streaming(engine, options):
    whole = engine(**options).query(QUESTION)
    streamed = engine(streaming=True, **options).query(QUESTION)
    assert isinstance(streamed, StreamingResponse)
    assert streamed.source_nodes == whole.source_nodes
    pieces = list(streamed.response_gen)
    assert "".join(pieces) == whole.response
    assert len(pieces) > 3


@pytest.mark.parametrize("options", [{}, {"text_qa_template": TEMPLATE}])
async def test_async_is_sync(engine, options):
    whole = engine(**options).query(QUESTION)
    assert (await engine(**options).aquery(QUESTION)).response == whole.response
    streamed = await engine(streaming=True, **options).aquery(QUESTION)
    assert isinstance(streamed, AsyncStreamingResponse)
    assert "".join([piece async for piece in streamed.async_response_gen()]) == whole.response
    assert streamed.source_nodes == whole.source_nodes


# Inside the stock engine


def test_what_a_postprocessor_leaves_out_is_not_read(kb, engine, recorder):
    scores = [hit.score for hit in kb.retrieve(QUESTION, k=3)]
    cut = SimilarityPostprocessor(similarity_cutoff=(scores[0] + scores[1]) / 2)
    response = engine(postprocessors=[cut]).query(QUESTION)
    assert len(response.source_nodes) == 1
    assert response.response == kb.ask(QUESTION, k=1, sampling=SAMPLING).text
    assert [len(answer["hits"]) for answer in recorder.answers()] == [1]


def test_the_text_that_a_postprocessor_leaves_is_read(kb, engine, recorder):
    response = engine(postprocessors=[Shout()]).query(QUESTION)
    loud = [rc.Passage(hit.chunk.text.upper()) for hit in kb.retrieve(QUESTION, k=3)]
    assert response.response == kb.ask(QUESTION, hits=loud, sampling=SAMPLING).text
    assert recorder.answers()[0]["hits"][0]["handle"] != response.source_nodes[0].metadata[HANDLE_KEY]
    assert response.response != engine().query(QUESTION).response


def test_no_nodes_give_the_empty_response(engine):
    nothing = [SimilarityPostprocessor(similarity_cutoff=9.0)]
    assert engine(postprocessors=nothing).query(QUESTION).response == "Empty Response"
    assert str(engine(postprocessors=nothing, empty_response="Nothing.").query(QUESTION)) == "Nothing."
    assert "".join(engine(postprocessors=nothing, streaming=True).query(QUESTION).response_gen) == "Empty Response"


def test_callbacks_and_events_are_those_of_any_engine(kb, llm, engine, recorder):
    debug = LlamaDebugHandler(print_trace_on_end=False)
    manager = CallbackManager([debug])
    synthesizer = FusedSynthesizer(llm, callback_manager=manager)
    retriever = RagCacheRetriever(kb, k=2, callback_manager=manager)
    RetrieverQueryEngine(retriever, synthesizer, callback_manager=manager).query(QUESTION)
    for kind in (CBEventType.QUERY, CBEventType.RETRIEVE, CBEventType.SYNTHESIZE, CBEventType.LLM):
        assert len(debug.get_event_pairs(kind)) == 1, kind
    names = [event.class_name() for event in recorder.events]
    order = "QueryStart RetrievalStart RetrievalEnd SynthesizeStart LLMChatStart LLMChatEnd SynthesizeEnd QueryEnd"
    places = [names.index(f"{name}Event") for name in order.split()]
    assert places == sorted(places)


def test_get_response_reads_texts_where_there_are_no_nodes(kb, llm):
    texts = [hit.chunk.text for hit in kb.retrieve(QUESTION, k=2)]
    answer = FusedSynthesizer(llm).get_response(QUESTION, texts)
    assert answer == kb.ask(QUESTION, k=2, sampling=SAMPLING).text


def test_metadata_is_read_where_asked_for(kb, llm):
    nodes = RagCacheRetriever(kb, k=2).retrieve(QUESTION)
    read = [rc.Passage(node.node.get_content(MetadataMode.LLM)) for node in nodes]
    assert "year" in read[0].text
    response = FusedSynthesizer(llm, metadata_mode=MetadataMode.LLM).synthesize(QUESTION, nodes)
    assert response.response == kb.ask(QUESTION, hits=read, sampling=SAMPLING).text


def test_earlier_turns_are_read(kb, llm):
    turns = [("system", "Be brief."), ("user", "Who?"), ("assistant", "Nobody.")]
    nodes, hits = RagCacheRetriever(kb, k=2).retrieve(QUESTION), kb.retrieve(QUESTION, k=2)
    history = [ChatMessage(text, role=role) for role, text in turns]
    response = FusedSynthesizer(llm, history=history).synthesize(QUESTION, nodes)
    messages = [{"role": role, "content": text} for role, text in [*turns, ("user", QUESTION)]]
    assert response.response == kb.chat(messages, passages=hits, sampling=SAMPLING).text


# Templates


def passages(kb, k: int = 2) -> list[rc.Passage]:
    return [rc.Passage(hit.chunk.text) for hit in kb.retrieve(QUESTION, k=k)]


@pytest.mark.parametrize("question", [QUESTION, "Is {context_str} or {query_str} {here}?"])
def test_a_template_is_completed_by_a_model_without_a_chat_template(kb, engine, question):
    """A question with braces in it stays a question."""
    found = [rc.Passage(hit.chunk.text) for hit in kb.retrieve(question, k=2)]
    expected = kb.complete(["Context:\n", *found, f"\nAsked: {question}\nSaid:"], sampling=SAMPLING)
    assert engine(k=2, text_qa_template=TEMPLATE).query(question).response == expected.text


TEMPLATES = {
    "text": PromptTemplate("Context:\n{context_str}\nAsked: {query_str}"),
    "renamed": PromptTemplate(
        "Context:\n{passages}\nAsked: {question}",
        template_var_mappings={"context_str": "passages", "query_str": "question"},
    ),
    "partial": PromptTemplate("{head}\n{context_str}\nAsked: {query_str}").partial_format(head="Context:"),
    "chat": ChatPromptTemplate([ChatMessage("Context:\n{context_str}\nAsked: {query_str}")]),
    "jinja": RichPromptTemplate("Context:\n{{ context_str }}\nAsked: {{ query_str }}"),
}


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_a_template_is_a_message_to_a_chat_model(kb, engine, chat_template, template):
    parts = ["Context:\n", *passages(kb), f"\nAsked: {QUESTION}"]
    expected = kb.chat([{"role": "user", "content": parts}], sampling=SAMPLING)
    assert engine(k=2, text_qa_template=template).query(QUESTION).response == expected.text


def test_context_in_a_system_message_is_read_there(kb, engine, chat_template):
    template = ChatPromptTemplate([ChatMessage("Know:\n{context_str}", role="system"), ChatMessage("{query_str}")])
    messages = [{"role": "system", "content": ["Know:\n", *passages(kb)]}, {"role": "user", "content": QUESTION}]
    expected = kb.chat(messages, sampling=SAMPLING)
    assert engine(k=2, text_qa_template=template).query(QUESTION).response == expected.text


def test_other_variables_of_a_template_are_filled_in(kb, llm):
    template = PromptTemplate("{tone}\n{context_str}\nAsked: {query_str}\nSaid:")
    nodes = RagCacheRetriever(kb, k=2).retrieve(QUESTION)
    response = FusedSynthesizer(llm, text_qa_template=template).synthesize(QUESTION, nodes, tone="Kindly:")
    expected = kb.complete(["Kindly:\n", *passages(kb), f"\nAsked: {QUESTION}\nSaid:"], sampling=SAMPLING)
    assert response.response == expected.text


def test_a_system_prompt_of_the_model_comes_first(kb, llm, engine):
    llm.system_prompt = "Be brief."
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}]
    expected = kb.chat(messages, passages=passages(kb), sampling=SAMPLING)
    assert engine(k=2).query(QUESTION).response == expected.text
    template = PromptTemplate("{context_str}\n{query_str}")
    expected = kb.complete(["Be brief.\n\n", *passages(kb), f"\n{QUESTION}"], sampling=SAMPLING)
    assert engine(k=2, text_qa_template=template).query(QUESTION).response == expected.text


def test_prompts_can_be_read_and_replaced(kb, engine):
    made = engine(k=2, text_qa_template=PromptTemplate("{context_str}\n{query_str}"))
    assert set(made.get_prompts()) == {"response_synthesizer:text_qa_template"}
    made.update_prompts({"response_synthesizer:text_qa_template": PromptTemplate("Oh:\n{context_str}{query_str}")})
    expected = kb.complete(["Oh:\n", *passages(kb), QUESTION], sampling=SAMPLING)
    assert made.query(QUESTION).response == expected.text
    with pytest.raises(ConfigError, match="context_str"):
        made.update_prompts({"response_synthesizer:text_qa_template": PromptTemplate("{query_str}")})
    assert engine().get_prompts() == {}


def test_the_frameworks_settings_give_the_model(llm, engine, monkeypatch):
    monkeypatch.setattr(Settings, "_llm", llm)
    assert FusedSynthesizer()._llm is llm
