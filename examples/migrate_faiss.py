"""An application with a FAISS vector store and a stuff chain, before and after.

`migrate` reads two attributes of langchain_community's FAISS: `docstore` and `index_to_docstore_id`. Here a small class
with the same attributes replaces it, so that the example runs without that package.

python examples/migrate_faiss.py [DIRECTORY OF THE STORE]
"""

import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import faiss
import numpy as np
from langchain_core.callbacks import UsageMetadataCallbackHandler
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableLambda, RunnablePassthrough

from langchain_ragcache import (
    ChatRagCache,
    RagCacheEmbeddings,
    RagCacheVectorStore,
    create_fused_documents_chain,
    create_fused_retrieval_chain,
)

PEOPLE = Path(__file__).parent / "corpus" / "people"
PROMPT = ChatPromptTemplate.from_messages([("human", "{context}Question: {input}")])
QUESTION = "In what town does Eva Elden live?"
K = 4


class FaissStore:
    """The part of langchain_community's FAISS that an application like this one uses."""

    def __init__(self, documents: list[Document], embeddings: Embeddings) -> None:
        self.embeddings = embeddings
        kept = {str(document.id): document for document in documents}
        self.docstore = SimpleNamespace(search=kept.get)
        self.index_to_docstore_id = dict(enumerate(kept))
        vectors = np.array(embeddings.embed_documents([document.page_content for document in documents]), np.float32)
        self.index = faiss.IndexFlatL2(vectors.shape[1])
        self.index.add(vectors)

    def similarity_search(self, question: str) -> list[Document]:
        _, [rows] = self.index.search(np.array([self.embeddings.embed_query(question)], np.float32), K)
        return [self.docstore.search(self.index_to_docstore_id[row]) for row in rows]


def before(old: FaissStore, llm: ChatRagCache) -> Any:
    """Return the old chain: the documents' text is joined into the prompt, and the model reads all of it each time."""
    find = RunnableLambda(lambda asked: old.similarity_search(asked["input"]))
    joined = RunnableLambda(lambda asked: "".join(f"{found.page_content.rstrip()}\n" for found in asked["context"]))
    read = RunnablePassthrough.assign(context=joined) | PROMPT | llm | StrOutputParser()
    return RunnablePassthrough.assign(context=find).assign(answer=read)


def migrate(old: Any, directory: str) -> RagCacheVectorStore:
    """Return a new store with every document of the old, with its id and metadata, embedded by the same model."""
    documents = [old.docstore.search(id).model_copy(update={"id": id}) for id in old.index_to_docstore_id.values()]
    return RagCacheVectorStore.from_documents(documents, old.embeddings, kb=directory)


def after(new: RagCacheVectorStore, llm: ChatRagCache) -> Any:
    """Return the new chain: documents reach the model one by one, with their KV, and it reads the question alone."""
    read = create_fused_documents_chain(llm, PROMPT)
    return create_fused_retrieval_chain(new.as_retriever(search_kwargs={"k": K}), read)


def main(directory: str) -> None:
    documents = [Document(id=path.stem, page_content=path.read_text(encoding="utf-8")) for path in PEOPLE.glob("*.md")]
    old = FaissStore(documents, RagCacheEmbeddings(embedder="minilm"))
    with migrate(old, directory) as new:
        llm = ChatRagCache(kb=new.kb)
        for name, chain in {"before": before(old, llm), "after": after(new, llm)}.items():
            usage = UsageMetadataCallbackHandler()
            answer = chain.invoke({"input": QUESTION}, {"callbacks": [usage]})["answer"]
            [tokens] = usage.usage_metadata.values()
            reused = tokens["input_token_details"]["cache_read"]
            print(
                f"{name}: {answer.strip()} ({tokens['input_tokens'] - reused} of {tokens['input_tokens']} tokens read)"
            )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as directory:
            main(directory)
