"""An agent that looks something up with a retriever tool, and reads the documents found by fused prefill.

The tool's message holds the documents' text, for the agent; its artifact holds the documents with their handles, for
the chain that answers from them. Any model that calls tools can be the agent; here it is replaced by a scripted model.

python examples/agent_tool.py [DIRECTORY OF THE STORE]
"""

import sys
import tempfile
from pathlib import Path

from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, ToolCall
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.tools import create_retriever_tool

import ragcache as rc
from langchain_ragcache import ChatRagCache, RagCacheRetriever, create_fused_documents_chain

CORPUS = Path(__file__).parent / "corpus"
PROMPT = ChatPromptTemplate.from_messages([("human", "{context}Question: {input}")])
QUESTION = "What town does Petra Elley live in?"


def agent_model() -> GenericFakeChatModel:
    """Return a scripted model that calls the tool once, in place of a model with tools bound."""
    look_up = ToolCall(name="registry", args={"query": QUESTION}, id="call-1", type="tool_call")
    return GenericFakeChatModel(messages=iter([AIMessage("", tool_calls=[look_up])]))


def main(directory: str) -> None:
    with rc.RagCache.open(directory) as kb:
        kb.ingest([CORPUS / "people"])
        registry = create_retriever_tool(
            RagCacheRetriever(kb=kb, k=4),
            "registry",
            "Finds entries about people.",
            response_format="content_and_artifact",
        )
        read = create_fused_documents_chain(ChatRagCache(kb=kb), PROMPT)
        for call in agent_model().invoke(QUESTION).tool_calls:
            found = registry.invoke(call)
            print(f"{call['name']}({call['args']['query']!r}): {len(found.artifact)} documents")
            print(read.invoke({"input": QUESTION, "context": found.artifact}).strip())


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as directory:
            main(directory)
