"""Chains: the engine's own answers through LangChain's runnables, at the engine's own cost."""

import json
from pathlib import Path

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import AIMessage
from langchain_core.output_parsers import BaseOutputParser, StrOutputParser
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder, PromptTemplate
from langchain_core.runnables import RunnableLambda, RunnablePassthrough
from langchain_core.tools import create_retriever_tool
from langchain_registry import QUESTION, REGISTRY, registry_documents
from pydantic import Field

import ragcache as rc
from langchain_ragcache import (
    ChatRagCache,
    RagCacheRetriever,
    RagCacheVectorStore,
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


class LastAnswer(BaseCallbackHandler):
    """What the model said last, with its usage, from inside a chain; and what it was asked."""

    def on_chat_model_start(self, serialized, messages, **kwargs):
        self.messages = messages[0]

    def on_llm_end(self, response, **kwargs):
        self.message = response.generations[0][0].message


def suffix_and_link_tokens(kb: rc.RagCache, question: str, passages: int) -> int:
    """Tokens behind the passages, counted by hand, and the trained ones that the checkpoint's configuration states: so
    many behind every passage, and one that closes them all."""
    stated = json.loads((Path(rc.__file__).parent / "mini" / "config.json").read_text())["ragcache"]
    suffix = kb.lm.tokenizer(f"Question: {question}\nAnswer:", add_special_tokens=False)["input_ids"]
    return len(suffix) + stated["link_tokens"] * passages + (stated["kv_end_id"] is not None)


# Answers


OTHER_QUESTIONS = ["What is Rosa Belson's profession?", "Where does Conrad Dorden live?"]


@pytest.mark.parametrize(
    "question", [QUESTION, *(pytest.param(one, marks=pytest.mark.slow) for one in OTHER_QUESTIONS)]
)
async def test_a_chain_answers_as_the_store_does_and_runs_only_suffix_and_links(registry, chain, question):
    seen = LastAnswer()
    result = chain.invoke({"input": question}, {"callbacks": [seen]})
    own = registry.ask(question, 3)
    assert result["answer"] == own.text
    assert result["input"] == question
    assert [document.id for document in result["context"]] == [hit.chunk.id for hit in own.hits]

    usage, about = seen.message.usage_metadata, seen.message.response_metadata
    computed = suffix_and_link_tokens(registry, question, 3)
    assert about["computed_tokens"] == own.usage.computed_tokens == computed
    assert usage["input_tokens"] == own.usage.prompt_tokens
    assert usage["input_token_details"] == {"cache_read": own.usage.prompt_tokens - computed, "cache_creation": 0}
    assert {source["kv"] for source in about["sources"]} == {"memory"}
    assert about["method"] == "link"
    assert (await chain.ainvoke({"input": question}))["answer"] == own.text


def test_the_first_answer_after_adding_documents_computes_no_passage(open_store, minilm):
    kb = open_store("fresh", embedder=minilm)
    RagCacheVectorStore(kb).add_documents(registry_documents())
    documents_chain = create_fused_documents_chain(ChatRagCache(kb=kb), PROMPT)
    seen = LastAnswer()
    documents_chain.invoke(
        {"input": QUESTION, "context": RagCacheRetriever(kb=kb, k=2).invoke(QUESTION)}, {"callbacks": [seen]}
    )
    assert {source["kv"] for source in seen.message.response_metadata["sources"]} <= {"memory", "disk"}


async def test_streaming(registry, chain):
    expected = registry.ask(QUESTION, 3).text
    pieces = list(chain.stream({"input": QUESTION}))
    apieces = [piece async for piece in chain.astream({"input": QUESTION})]
    for found in (pieces, apieces):
        assert [next(iter(piece)) for piece in found[:2]] == ["input", "context"]
        answers = [piece["answer"] for piece in found if "answer" in piece]
        assert "".join(answers) == expected
        assert len([answer for answer in answers if answer]) > 3, "the answer came in one piece"


@pytest.mark.slow
async def test_batches(registry, chain):
    questions = [QUESTION, "What is Rosa Belson's profession?"] * 4
    expected = [registry.ask(question, 3).text for question in questions]
    inputs = [{"input": question} for question in questions]
    assert [result["answer"] for result in chain.batch(inputs)] == expected
    assert [result["answer"] for result in await chain.abatch(inputs)] == expected


async def test_events_name_the_steps(chain):
    names = {(e["event"], e["name"]) async for e in chain.astream_events({"input": QUESTION}, version="v2")}
    assert ("on_chain_start", "fused_retrieval_chain") in names
    assert ("on_chain_start", "fused_documents_chain") in names
    assert ("on_chain_start", "fuse_documents") in names
    assert ("on_chain_end", "retrieve_documents") in names
    assert ("on_retriever_end", "RagCacheRetriever") in names
    assert ("on_chat_model_stream", "ChatRagCache") in names
    assert ("on_prompt_end", "ChatPromptTemplate") in names


def test_arguments_bound_to_the_model(llm, retriever, registry):
    documents_chain = create_fused_documents_chain(llm.bind(max_tokens=2), PROMPT)
    answer = documents_chain.invoke({"input": QUESTION, "context": retriever.invoke(QUESTION)})
    assert answer == registry.ask(QUESTION, 3, sampling=rc.Sampling(2)).text
    seen = LastAnswer()
    documents_chain.invoke(
        {"input": QUESTION, "context": retriever.invoke(QUESTION)}, {"callbacks": [seen], "tags": ["x"]}
    )
    assert seen.message.usage_metadata["input_token_details"]["cache_read"] > 0


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
    own = registry.chat(
        [
            {"role": "system", "content": "Answer from the registry."},
            {"role": "user", "content": "Question: Who is there?"},
            {"role": "assistant", "content": "Jonas Lansen."},
            {
                "role": "user",
                "content": [
                    "These are entries:\n",
                    *(rc.Passage(document.page_content) for document in found),
                    f"\n\nQuestion: {QUESTION}",
                ],
            },
        ]
    )
    assert answer == own.text


def test_a_stock_chain_reads_passages_from_their_kv(registry, llm, retriever, caplog):
    """LangChain's stuff chain and its like join the documents in front of the model. A method that cannot read what
    stands between them, or puts tokens of its own there as the model's own `link` does, says so, once."""
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


def test_documents_from_anywhere(registry, llm):
    elsewhere = [Document(page_content="Ada Wersen works as a potter."), Document(page_content=REGISTRY["belson"])]
    question = "What is Ada Wersen's profession?"
    answer = create_fused_documents_chain(llm, PROMPT).invoke({"input": question, "context": elsewhere})
    content = [*(rc.Passage(document.page_content) for document in elsewhere), f"Question: {question}"]
    assert answer == registry.chat([{"role": "user", "content": content}]).text


def test_no_documents(registry, llm):
    answer = create_fused_documents_chain(llm.bind(max_tokens=24), PROMPT).invoke({"input": QUESTION, "context": []})
    turns = [{"role": "user", "content": f"Question: {QUESTION}"}]
    assert answer == registry.chat(turns, sampling=rc.Sampling(max_tokens=24)).text


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
    seen = LastAnswer()
    create_fused_documents_chain(llm, PROMPT).invoke(asked, {"callbacks": [seen]})
    assert seen.messages[0].content[-1] == {"type": "text", "text": "Question: {context} documents0 <context>"}
    assert len(seen.messages[0].content) == 4


# Other models, tools


def test_another_model_reads_the_documents_as_text(retriever):
    seen = LastAnswer()
    other = GenericFakeChatModel(messages=iter([AIMessage("the Rowing Club Heron")]))
    documents_chain = create_fused_documents_chain(other, PROMPT)
    found = retriever.invoke(QUESTION)
    assert documents_chain.invoke({"input": QUESTION, "context": found}, {"callbacks": [seen]}) == other_answer()
    content = seen.messages[0].content
    assert all(set(block) == {"type", "text"} for block in content), "services refuse keys that they do not know"
    assert seen.messages[0].text == "".join(f"{d.page_content}\n" for d in found) + f"Question: {QUESTION}"


class Down(GenericFakeChatModel):
    """Another service's model that cannot answer, and notes what it was asked and told."""

    asked: list = Field(default_factory=list)

    def _generate(self, messages, stop=None, run_manager=None, **kwargs):
        self.asked.append((messages, kwargs))
        raise RuntimeError("the service is down")


def down() -> Down:
    return Down(messages=iter([]))


SIMPLER_BUILDS = [
    lambda llm, other: llm.with_fallbacks([other]),
    lambda llm, other: other.with_fallbacks([llm]),
    lambda llm, other: other.with_fallbacks([llm]).bind(max_tokens=40),
    lambda llm, other: llm | StrOutputParser(),
    lambda llm, other: (other | StrOutputParser()).with_fallbacks([llm | StrOutputParser()]),
]


@pytest.mark.parametrize(
    "build",
    [
        *(pytest.param(build, marks=pytest.mark.slow) for build in SIMPLER_BUILDS),
        lambda llm, other: other.bind(stop=["@@"]).with_fallbacks([llm.bind(stop=["@@"])]).with_config(tags=["a"]),
        lambda llm, other: (other | StrOutputParser()).with_fallbacks([llm]).bind(max_tokens=40),
        lambda llm, other: other.with_fallbacks([llm]) | StrOutputParser() | RunnableLambda(lambda text: text),
    ],
)
async def test_a_model_may_have_fallbacks_and_steps_behind_it(registry, llm, retriever, build):
    """The store's model within reads passages from their KV, and another service's sees text."""
    other = down()
    chain = create_fused_documents_chain(build(llm, other), PROMPT)
    own, seen = registry.ask(QUESTION, 3), LastAnswer()
    given = {"input": QUESTION, "context": retriever.invoke(QUESTION)}
    assert chain.invoke(given, {"callbacks": [seen]}) == own.text
    assert seen.message.response_metadata["computed_tokens"] == own.usage.computed_tokens
    assert await chain.ainvoke(given) == own.text
    assert "".join(chain.stream(given)) == own.text
    for messages, options in other.asked:
        assert all(set(block) == {"type", "text"} for block in messages[0].content)
        assert messages[0].text == "".join(f"{d.page_content}\n" for d in given["context"]) + f"Question: {QUESTION}"
        assert options in ({}, {"max_tokens": 40}) or "@@" in str(options)


def test_a_model_with_a_form_gives_what_its_parser_makes(llm, retriever):
    shape = {"title": "job", "type": "object", "properties": {"of": {"enum": ["Rosa"]}}, "required": ["of"]}
    given = {"input": QUESTION, "context": retriever.invoke(QUESTION)}
    for include_raw in (False, True):
        formed = llm.with_structured_output(shape, include_raw=include_raw)
        found = create_fused_documents_chain(formed, PROMPT).invoke(given)
        assert (found["parsed"] if include_raw else found) == {"of": "Rosa"}


def other_answer() -> str:
    return "the Rowing Club Heron"


def test_a_retriever_may_be_any_runnable_over_the_input(registry, llm, retriever):
    chain = create_fused_retrieval_chain(
        RunnableLambda(lambda inputs: inputs["query"]) | retriever, create_fused_documents_chain(llm, PROMPT)
    )
    result = chain.invoke({"input": QUESTION, "query": QUESTION})
    assert result["answer"] == registry.ask(QUESTION, 3).text


async def test_the_documents_of_a_retriever_tool(registry, llm, retriever):
    tool = create_retriever_tool(retriever, "registry", "Looks people up.", response_format="content_and_artifact")
    call = {"name": "registry", "args": {"query": QUESTION}, "id": "1", "type": "tool_call"}
    for message in (tool.invoke(call), await tool.ainvoke(call)):
        assert message.content == "\n\n".join(document.page_content for document in message.artifact)
        seen = LastAnswer()
        answer = create_fused_documents_chain(llm, PROMPT).invoke(
            {"input": QUESTION, "context": message.artifact}, {"callbacks": [seen]}
        )
        assert answer == registry.ask(QUESTION, 3).text
        computed = suffix_and_link_tokens(registry, QUESTION, 3)
        assert seen.message.response_metadata["computed_tokens"] == computed


# What is refused


@pytest.mark.parametrize("template", ["Question: {input}", "{documents}Question: {input}", "{{context}} {input}"])
def test_a_prompt_without_a_place_for_documents(llm, template):
    with pytest.raises(ConfigError, match=r"no \{context\}.*input"):
        create_fused_documents_chain(llm, ChatPromptTemplate.from_messages([("human", template)]))


@pytest.mark.parametrize(
    ("messages", "places"),
    [
        ([("human", "{context} and {context}{input}")], 2),
        ([("system", "{context}"), ("human", "{context}{input}")], 2),
        ([("human", [{"type": "image_url", "image_url": {"url": "{context}"}}]), ("human", "{input}")], 0),
    ],
)
def test_a_prompt_without_a_single_place_for_documents(llm, messages, places):
    documents_chain = create_fused_documents_chain(llm, ChatPromptTemplate.from_messages(messages))
    with pytest.raises(PromptError, match=f"{places} places"):
        documents_chain.invoke({"input": QUESTION, "context": [Document(page_content="one")]})


def test_a_placeholder_of_messages_is_no_place_for_documents(llm):
    prompt = ChatPromptTemplate.from_messages([MessagesPlaceholder("context"), ("human", "{input}")])
    with pytest.raises(ConfigError, match="MessagesPlaceholder"):
        create_fused_documents_chain(llm, prompt)


@pytest.mark.parametrize(
    "inputs", [{"input": "x"}, {"input": "x", "context": "text"}, {"input": "x", "context": ["a"]}]
)
def test_an_input_without_documents(llm, inputs):
    with pytest.raises(PromptError, match="context"):
        create_fused_documents_chain(llm, PROMPT).invoke(inputs)


def test_an_input_without_a_question(chain):
    with pytest.raises(PromptError, match="input"):
        chain.invoke({"question": QUESTION})


def test_a_document_prompt_and_a_separator_stand_between_passages(registry, llm, retriever):
    """The chain's answer is the engine's over the same parts, and the passages' KV is reused."""
    found = [
        Document(doc.page_content, metadata={**doc.metadata, "n": n})
        for n, doc in enumerate(retriever.invoke(QUESTION))
    ]
    labels = PromptTemplate.from_template("[{n}] {page_content}(end)")
    chain = create_fused_documents_chain(llm, PROMPT, document_prompt=labels, document_separator="\n---\n")
    seen = LastAnswer()
    said = chain.invoke({"input": QUESTION, "context": found}, {"callbacks": [seen]})
    one, two, three = [rc.Passage(doc.page_content, handle=doc.metadata["ragcache_handle"]) for doc in found]
    parts = ["[0] ", one, "(end)\n---\n[1] ", two, "(end)\n---\n[2] ", three, f"(end)Question: {QUESTION}"]
    right = registry.chat([{"role": "user", "content": parts}])
    assert said == right.text
    assert [source["kv"] for source in seen.message.response_metadata["sources"]] == ["memory"] * 3
    assert (
        seen.message.usage_metadata["input_token_details"]["cache_read"] > sum(len(one.text) for one in (one, two)) // 8
    )


@pytest.mark.parametrize("template", ["{n}", "{page_content} {page_content}", "{{page_content}}"])
def test_a_document_prompt_without_its_document_is_refused(llm, template):
    with pytest.raises(ConfigError, match=r"document_prompt has to write \{page_content\} once"):
        create_fused_documents_chain(llm, PROMPT, document_prompt=PromptTemplate.from_template(template))


def test_a_plain_document_prompt_changes_nothing(llm, retriever):
    found = {"input": QUESTION, "context": retriever.invoke(QUESTION)}
    plain = PromptTemplate.from_template("{page_content}")
    same = create_fused_documents_chain(llm, PROMPT, document_prompt=plain, document_separator="\n")
    assert same.invoke(found) == create_fused_documents_chain(llm, PROMPT).invoke(found)
