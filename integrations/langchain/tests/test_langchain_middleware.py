"""An agent whose tools find documents elsewhere: their KV is kept, and read at the next call of the model."""

import pytest
from kit.makers import tiny_lm
from langchain_core.documents import Document
from langchain_core.messages import AIMessage
from langchain_core.retrievers import BaseRetriever
from langchain_core.tools import create_retriever_tool, tool
from scripted import script
from templates import TOOL_TEMPLATES

import ragcache as rc
from langchain_ragcache import ChatRagCache, RagCacheMiddleware

agents = pytest.importorskip("langchain.agents")

TEXTS = [
    "The lighthouse of Brenholm was built of oak, and burnt down in a night of May, as the town records tell.",
    "A ferry goes from Brenholm to the island every second hour, but not on Sundays, when the captain sleeps.",
]
CALL = '<tool_call>\n{"name": "NAME", "arguments": {"query": "ferry"}}\n</tool_call>'


class Elsewhere(BaseRetriever):
    """Somebody's own retriever."""

    texts: list[str] = TEXTS

    def _get_relevant_documents(self, query, *, run_manager):
        return [Document(page_content=text, metadata={"n": rank}) for rank, text in enumerate(self.texts)]


@tool
def notes(query: str) -> str:
    """Look into the notes."""
    return "\n\n".join(TEXTS)


@tool
def broken(query: str) -> str:
    """Fail."""
    raise RuntimeError("the notes are away")


lm = tiny_lm(positions=8192, chat_template=TOOL_TEMPLATES["hermes"])


@pytest.fixture
def open_chat(open_kb):
    store = rc.StoreConfig(load="always", prefix_bytes=0)
    return lambda method="reposition": ChatRagCache(kb=open_kb(method=method, store=store), max_tokens=300)


def run(chat, monkeypatch, tool, **options) -> tuple[list, list[AIMessage]]:
    """One question that the agent asks this tool about, in a conversation of its own. All messages, and the answers."""
    script(monkeypatch, chat.kb.lm, CALL.replace("NAME", tool.name), "It rests.")
    agent = agents.create_agent(chat, [tool], middleware=[RagCacheMiddleware(chat.kb, **options)])
    messages = agent.invoke({"messages": [("human", "When does the ferry go?")]})["messages"]
    return messages, [message for message in messages if isinstance(message, AIMessage)]


def tokens(chat) -> int:
    return sum(map(chat.kb.count_tokens, TEXTS))


def cached(message: AIMessage) -> int:
    return message.usage_metadata["input_token_details"]["cache_read"]


def kept(chat) -> list[bool]:
    return [handle is not None for handle in chat.kb.precompute(TEXTS, dry_run=True).handles]


@pytest.mark.parametrize("form", ["content_and_artifact", "content"])
def test_documents_of_a_tool_are_read_from_their_kv(open_chat, monkeypatch, form):
    chat = open_chat()
    found = create_retriever_tool(Elsewhere(), "registry", "Looks things up.", response_format=form)
    messages, (first, second) = run(chat, monkeypatch, found, text_of=["registry"])
    assert cached(first) == 0
    assert kept(chat) == [True, True]
    assert cached(second) >= 0.95 * tokens(chat)
    if form == "content_and_artifact":
        result = messages[2]
        assert [one.metadata["n"] for one in result.artifact] == [0, 1]
        assert [one.metadata["ragcache_handle"] for one in result.artifact] == chat.kb.precompute(TEXTS).handles


@pytest.mark.parametrize("named", [True, False])
def test_text_of_tools_that_are_named(open_chat, monkeypatch, named):
    chat = open_chat()
    _, (_, second) = run(chat, monkeypatch, notes, text_of=["notes"] if named else [])
    assert kept(chat) == [named] * 2
    assert (cached(second) >= 0.95 * tokens(chat)) is named


def test_a_method_that_reads_no_blocks_is_left_alone(open_chat, monkeypatch):
    chat = open_chat("full")
    run(chat, monkeypatch, notes, text_of=["notes"])
    assert kept(chat) == [False, False]


def test_a_tool_that_fails(open_chat, monkeypatch):
    with pytest.raises(RuntimeError, match="the notes are away"):
        run(open_chat(), monkeypatch, broken, text_of=["broken"])


def test_blank_documents_pass(open_chat, monkeypatch):
    chat = open_chat()
    found = create_retriever_tool(Elsewhere(texts=[*TEXTS, " "]), "r", "Look.", response_format="content_and_artifact")
    messages, _ = run(chat, monkeypatch, found)
    assert "ragcache_handle" not in messages[2].artifact[0].metadata
