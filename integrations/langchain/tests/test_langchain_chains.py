"""Chains: LangChain's runnables give the engine's own answers, at the engine's own cost."""

from functools import partial

import pytest
from langchain_core.documents import Document
from langchain_core.language_models import GenericFakeChatModel
from langchain_core.output_parsers import BaseOutputParser, StrOutputParser
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder, PromptTemplate
from langchain_core.runnables import RunnableLambda, RunnablePassthrough
from langchain_doubles import Seen
from langchain_registry import QUESTION

import ragcache as rc
from langchain_ragcache import (
    ChatRagCache,
    RagCacheRetriever,
    create_fused_documents_chain,
    create_fused_retrieval_chain,
)
from ragcache.errors import ConfigError, PromptError

# Written as the store itself writes a question behind its passages.
PROMPT = ChatPromptTemplate.from_messages([("human", "{context}Question: {input}")])


@pytest.fixture
def llm(registry) -> ChatRagCache:
    return ChatRagCache(kb=registry)


@pytest.fixture
def retriever(registry) -> RagCacheRetriever:
    return RagCacheRetriever(kb=registry, k=3)


@pytest.fixture
def chain(llm, retriever):
    return create_fused_retrieval_chain(retriever, create_fused_documents_chain(llm, PROMPT))


# Answers


async def test_a_chain_answers_as_the_store_does_at_its_cost(registry, chain):
    seen = Seen()
    result = chain.invoke({"input": QUESTION}, {"callbacks": [seen]})
    own = registry.ask(QUESTION, 3)
    assert result["answer"] == own.text
    assert result["input"] == QUESTION
    assert [document.id for document in result["context"]] == [hit.chunk.id for hit in own.hits]

    usage, about = seen.message.usage_metadata, seen.message.response_metadata
    assert about["computed_tokens"] == own.usage.computed_tokens
    assert usage["input_tokens"] == own.usage.prompt_tokens
    assert usage["input_token_details"] == {"cache_read": own.usage.cached_tokens, "cache_creation": 0}
    assert {source["kv"] for source in about["sources"]} == {"memory"}
    assert about["method"] == "link"
    assert (await chain.ainvoke({"input": QUESTION}))["answer"] == own.text


async def test_events_name_the_steps(chain):
    names = {(e["event"], e["name"]) async for e in chain.astream_events({"input": QUESTION}, version="v2")}
    assert ("on_chain_start", "fused_retrieval_chain") in names
    assert ("on_chain_start", "fused_documents_chain") in names
    assert ("on_chain_start", "fuse_documents") in names
    assert ("on_chain_end", "retrieve_documents") in names
    assert ("on_retriever_end", "RagCacheRetriever") in names
    assert ("on_chat_model_stream", "ChatRagCache") in names
    assert ("on_prompt_end", "ChatPromptTemplate") in names


@pytest.mark.parametrize(
    "prompt",
    [
        ChatPromptTemplate.from_messages([("human", "{context}Question: {input}")]),
        ChatPromptTemplate.from_messages(
            [("human", [{"type": "text", "text": "{context}"}, {"type": "text", "text": "Question: {input}"}])]
        ),
        ChatPromptTemplate.from_messages([("human", "{{context}}Question: {{input}}")], template_format="mustache"),
        PromptTemplate.from_template("{context}Question: {input}"),
    ],
)
def test_every_kind_of_prompt(registry, llm, retriever, prompt):
    inputs = {"input": QUESTION, "context": retriever.invoke(QUESTION)}
    assert create_fused_documents_chain(llm, prompt).invoke(inputs) == registry.ask(QUESTION, 3).text


def test_text_around_the_documents_and_earlier_turns(registry, llm, retriever):
    prompt = ChatPromptTemplate.from_messages(
        [
            ("system", "Answer from the registry."),
            MessagesPlaceholder("history"),
            ("human", "These are entries:\n{context}\n\nQuestion: {input}"),
        ]
    )
    found = retriever.invoke(QUESTION)
    history = [("human", "Question: Who is there?"), ("ai", "Jonas Lansen.")]
    answer = create_fused_documents_chain(llm, prompt).invoke({"input": QUESTION, "context": found, "history": history})
    entries = [rc.Passage(document.page_content) for document in found]
    turns = [
        ("system", "Answer from the registry."),
        ("user", "Question: Who is there?"),
        ("assistant", "Jonas Lansen."),
        ("user", ["These are entries:\n", *entries, f"\n\nQuestion: {QUESTION}"]),
    ]
    own = registry.chat([{"role": role, "content": content} for role, content in turns])
    assert answer == own.text


def test_a_stock_chain_reads_passages_from_their_kv(registry, llm, retriever, caplog):
    """LangChain's stuff chain joins the documents before the model sees them. A method that cannot read the text
    between passages, or puts its own tokens there as the model's `link` does, warns of it once.
    """
    prompt = RunnablePassthrough.assign(
        context=lambda x: "\n\n".join(d.page_content for d in retriever.invoke(x["input"]))
    ) | ChatPromptTemplate.from_messages([("human", "{context}\n\nQuestion: {input}")])
    with caplog.at_level("WARNING"):
        message = (prompt | ChatRagCache(kb=registry, method="reposition")).invoke({"input": QUESTION})
        assert not caplog.records
        assert (prompt | llm).invoke({"input": QUESTION}).response_metadata["sources"] == []
        (prompt | ChatRagCache(kb=registry, method="epic")).invoke({"input": QUESTION})
    assert ["create_fused_documents_chain" in record.getMessage() for record in caplog.records] == [True]
    assert [source["kv"] for source in message.response_metadata["sources"]] == ["memory"] * 3
    assert message.usage_metadata["input_token_details"]["cache_read"] > message.usage_metadata["input_tokens"] // 2


def test_names_and_parser_are_the_callers(registry, llm, retriever):
    class Shout(BaseOutputParser[str]):
        def parse(self, text: str) -> str:
            return text.upper()

    prompt = ChatPromptTemplate.from_messages([("human", "{entries}Question: {input}")])
    documents_chain = create_fused_documents_chain(llm, prompt, output_parser=Shout(), document_variable_name="entries")
    found = documents_chain.invoke({"input": QUESTION, "entries": retriever.invoke(QUESTION)})
    assert found == registry.ask(QUESTION, 3).text.upper()


def test_a_question_cannot_take_the_place_of_documents(registry, llm, retriever):
    asked = {"input": "{context} documents0 <context>", "context": retriever.invoke(QUESTION)}
    seen = Seen()
    create_fused_documents_chain(llm, PROMPT).invoke(asked, {"callbacks": [seen]})
    assert seen.messages[0].content[-1] == {"type": "text", "text": "Question: {context} documents0 <context>"}
    assert len(seen.messages[0].content) == 4


# Models with more steps, tools


@pytest.mark.parametrize(
    "build",
    [
        lambda llm, down: llm.bind(max_tokens=40),
        lambda llm, down: llm | StrOutputParser(),
        lambda llm, down: down.with_fallbacks([llm]).bind(max_tokens=40),
        lambda llm, down: down.with_fallbacks([llm]) | StrOutputParser() | RunnableLambda(lambda text: text),
    ],
)
async def test_a_model_may_have_fallbacks_and_further_steps(registry, llm, retriever, build, monkeypatch):
    down = ChatRagCache(kb=registry, method="full")
    monkeypatch.setattr(registry, "chat", partial(failing, registry.chat))
    monkeypatch.setattr(registry, "achat", partial(failing, registry.achat))
    chain = create_fused_documents_chain(build(llm, down), PROMPT)
    own, seen = registry.ask(QUESTION, 3), Seen()
    given = {"input": QUESTION, "context": retriever.invoke(QUESTION)}
    assert chain.invoke(given, {"callbacks": [seen]}) == own.text
    assert seen.message.response_metadata["computed_tokens"] == own.usage.computed_tokens
    assert await chain.ainvoke(given) == own.text


def failing(chat, messages, **options):
    """Answer as the store does, but raise if method `full` is requested."""
    if options["method"] == "full":
        raise RuntimeError("the model is away")
    return chat(messages, **options)


def test_a_model_with_a_form_gives_what_its_parser_makes(llm, retriever):
    shape = {"title": "job", "type": "object", "properties": {"of": {"enum": ["Rosa"]}}, "required": ["of"]}
    given = {"input": QUESTION, "context": retriever.invoke(QUESTION)}
    for include_raw in (False, True):
        formed = llm.with_structured_output(shape, include_raw=include_raw)
        found = create_fused_documents_chain(formed, PROMPT).invoke(given)
        assert (found["parsed"] if include_raw else found) == {"of": "Rosa"}


def test_a_retriever_may_be_any_runnable_over_the_input(registry, llm, retriever):
    chain = create_fused_retrieval_chain(
        RunnableLambda(lambda inputs: inputs["query"]) | retriever, create_fused_documents_chain(llm, PROMPT)
    )
    result = chain.invoke({"input": QUESTION, "query": QUESTION})
    assert result["answer"] == registry.ask(QUESTION, 3).text


# What is refused


def of(*messages, **options):
    """Return a chain over a prompt of these messages."""
    return lambda llm: create_fused_documents_chain(llm, ChatPromptTemplate.from_messages(messages), **options)


def labelled(template: str):
    return of(("human", "{context}{input}"), document_prompt=PromptTemplate.from_template(template))


IMAGE = ("human", [{"type": "image_url", "image_url": {"url": "{context}"}}])
ONE = {"input": QUESTION, "context": [Document(page_content="one")]}
REFUSALS = [
    (of(("human", "Question: {input}")), ONE, ConfigError, r"no \{context\}.*input"),
    (of(("human", "{documents}Question: {input}")), ONE, ConfigError, r"no \{context\}.*input"),
    (of(("human", "{{context}} {input}")), ONE, ConfigError, r"no \{context\}.*input"),
    (of(MessagesPlaceholder("context"), ("human", "{input}")), ONE, ConfigError, "MessagesPlaceholder"),
    (of(("human", "{context} and {context}{input}")), ONE, PromptError, "2 places"),
    (of(("system", "{context}"), ("human", "{context}{input}")), ONE, PromptError, "2 places"),
    (of(IMAGE, ("human", "{input}")), ONE, PromptError, "0 places"),
    (labelled("{n}"), ONE, ConfigError, r"document_prompt has to write \{page_content\} once"),
    (labelled("{page_content} {page_content}"), ONE, ConfigError, "document_prompt has to write"),
    (labelled("{{page_content}}"), ONE, ConfigError, "document_prompt has to write"),
    (of(("human", "{context}{input}")), {"input": "x"}, PromptError, "context"),
    (of(("human", "{context}{input}")), {"input": "x", "context": "text"}, PromptError, "context"),
    (of(("human", "{context}{input}")), {"input": "x", "context": ["a"]}, PromptError, "context"),
    (
        lambda llm: create_fused_retrieval_chain(RagCacheRetriever(kb=llm.kb), RunnableLambda(str)),
        {"question": QUESTION},
        PromptError,
        "'input'",
    ),
    (
        lambda _: create_fused_documents_chain(GenericFakeChatModel(messages=iter([])), PROMPT),
        ONE,
        ConfigError,
        "a GenericFakeChatModel cannot read passages",
    ),
]


@pytest.mark.parametrize(("build", "given", "error", "words"), REFUSALS)
def test_bad_prompts_and_inputs_are_refused(llm, build, given, error, words):
    with pytest.raises(error, match=words):
        build(llm).invoke(given)


def test_a_document_prompt_and_a_separator_stand_between_passages(registry, llm, retriever):
    """The chain's answer equals the engine's over the same parts, and the passages' KV is reused."""
    found = [
        Document(doc.page_content, metadata={**doc.metadata, "n": n})
        for n, doc in enumerate(retriever.invoke(QUESTION))
    ]
    labels = PromptTemplate.from_template("[{n}] {page_content}(end)")
    chain = create_fused_documents_chain(llm, PROMPT, document_prompt=labels, document_separator="\n---\n")
    seen = Seen()
    said = chain.invoke({"input": QUESTION, "context": found}, {"callbacks": [seen]})
    one, two, three = [rc.Passage(doc.page_content, handle=doc.metadata["ragcache_handle"]) for doc in found]
    parts = ["[0] ", one, "(end)\n---\n[1] ", two, "(end)\n---\n[2] ", three, f"(end)Question: {QUESTION}"]
    right = registry.chat([{"role": "user", "content": parts}])
    assert said == right.text
    assert [source["kv"] for source in seen.message.response_metadata["sources"]] == ["memory"] * 3
    assert (
        seen.message.usage_metadata["input_token_details"]["cache_read"] > sum(len(one.text) for one in (one, two)) // 8
    )
