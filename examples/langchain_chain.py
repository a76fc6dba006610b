"""A LangChain retrieval chain whose model reads each document once, when it is added, and only the question afterwards.

python examples/langchain_chain.py [DIRECTORY OF THE STORE]
"""

import sys
import tempfile
from pathlib import Path

from langchain_core.documents import Document
from langchain_core.prompts import ChatPromptTemplate

from langchain_ragcache import (
    ChatRagCache,
    RagCacheRetriever,
    RagCacheVectorStore,
    create_fused_documents_chain,
    create_fused_retrieval_chain,
)

CORPUS = Path(__file__).parent / "corpus"
PROMPT = ChatPromptTemplate.from_messages([("human", "{context}Question: {input}")])
QUESTIONS = ["What town does Petra Elley live in?", "Which river flows past the town that is home to Petra Elley?"]


def main(directory: str) -> None:
    documents = [
        Document(id=path.stem, page_content=path.read_text(encoding="utf-8"), metadata={"kind": path.parent.name})
        for path in sorted(CORPUS.rglob("*.md"))
    ]
    with RagCacheVectorStore(directory) as store:
        store.add_documents(documents)  # embeds them, and computes their KV
        read = create_fused_documents_chain(ChatRagCache(kb=store.kb), PROMPT)
        chain = create_fused_retrieval_chain(RagCacheRetriever(kb=store.kb, k=4), read)
        for question in QUESTIONS:
            print(question, "->", end=" ")
            for piece in chain.stream({"input": question}):
                print(piece.get("answer", ""), end="", flush=True)
            print()
        result = chain.invoke({"input": QUESTIONS[0]})
        print("from", ", ".join(document.id for document in result["context"]))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as directory:
            main(directory)
