"""An agent whose tools find documents elsewhere: their KV is kept, and used at the model's next call."""

import pytest
from kit.makers import tiny_lm
from langchain_core.documents import Document
from langchain_core.messages import AIMessage
from langchain_core.retrievers import BaseRetriever
from langchain_core.tools import create_retriever_tool
from scripted import script
from templates import TOOL_TEMPLATES

import ragcache as rc
from langchain_ragcache import ChatRagCache

agents = pytest.importorskip("langchain.agents")

TEXTS = [
    "The lighthouse of Brenholm was built of oak, and burnt down in a night of May, as the town records tell.",
    "A ferry goes from Brenholm to the island every second hour, but not on Sundays, when the captain sleeps.",
]
CALL = '<tool_call>\n{"name": "registry", "arguments": {"query": "ferry"}}\n</tool_call>'


class Elsewhere(BaseRetriever):
    """A user's own retriever."""

    def _get_relevant_documents(self, query, *, run_manager):
        return [Document(page_content=text, metadata={"n": rank}) for rank, text in enumerate(TEXTS)]


lm = tiny_lm(positions=8192, chat_template=TOOL_TEMPLATES["hermes"])


@pytest.mark.parametrize("form", ["content_and_artifact", "content"])
def test_documents_of_a_tool_are_read_from_their_kv(open_kb, monkeypatch, form):
    store = rc.StoreConfig(load="always", prefix_bytes=0)
    chat = ChatRagCache(kb=open_kb(method="reposition", store=store), max_tokens=300)
    script(monkeypatch, chat.kb.lm, CALL, "It rests.")
    found = create_retriever_tool(rc.attach(Elsewhere(), chat.kb), "registry", "Looks up.", response_format=form)
    state = agents.create_agent(chat, [found]).invoke({"messages": [("human", "When does the ferry go?")]})
    messages = state["messages"]
    first, second = [one.usage_metadata["input_token_details"] for one in messages if isinstance(one, AIMessage)]
    assert first["cache_read"] == 0
    assert second["cache_read"] >= 0.95 * sum(map(chat.kb.count_tokens, TEXTS))
    if form == "content_and_artifact":
        artifact = messages[2].artifact
        assert [one.metadata["n"] for one in artifact] == [0, 1]
        assert [one.metadata["ragcache_handle"] for one in artifact] == chat.kb.precompute(TEXTS).handles
