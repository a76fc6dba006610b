"""Attachment of a user's own vector store or retriever to a ragcache store that keeps the KV of its documents.

Only KV and the name of each passage's document are kept here: embeddings, texts and searches stay where they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

from langchain_core.documents import BaseDocumentTransformer, Document
from langchain_core.retrievers import BaseRetriever
from langchain_core.vectorstores import VectorStore

import ragcache as rc
from langchain_ragcache.documents import HANDLE_KEY, clean, to_passage, without_handle
from ragcache.errors import ConfigError

# Methods that find documents: of the base classes, and of stores with methods of their own.
_FINDS = re.compile(r"a?(similarity_search|max_marginal_relevance_search|hybrid_search|search$|get_by_ids$)")
_RELEVANT = ("_get_relevant_documents", "_aget_relevant_documents")
_ADDS = ("add_documents", "aadd_documents", "add_texts", "aadd_texts")
# Other methods that change documents, in stores that have them.
_CHANGES = re.compile(r"a?((add|update|upsert)_(documents?|texts|embeddings)|upsert)$")
_DELETES = ("delete", "adelete")


class RagCacheDocumentTransformer(BaseDocumentTransformer):
    """A transformer that computes the KV of documents before they are stored, or before they reach the model.

    kb:         an open `rc.RagCache`, or the path of a store (`rc.open_shared`)
    collection: see `rc.RagCache.precompute`
    handles:    whether to return documents with the name of their KV in metadata["ragcache_handle"]

    It is callable, so it may be part of a chain: `retriever | RagCacheDocumentTransformer(kb) | ...`. Documents that
    the model cannot read are returned as they are. Raises the errors of `rc.RagCache.precompute`.
    """

    def __init__(self, kb: rc.RagCache | str | Path, *, collection: str = "", handles: bool = True) -> None:
        self.kb = rc.open_shared(kb)
        self.collection = collection
        self.handles = handles

    def transform_documents(self, documents: Sequence[Document], **kwargs: Any) -> Sequence[Document]:
        return self._done(documents, self.kb.precompute(list(documents), collection=self.collection))

    async def atransform_documents(self, documents: Sequence[Document], **kwargs: Any) -> Sequence[Document]:
        return self._done(documents, await self.kb.aprecompute(list(documents), collection=self.collection))

    def __call__(self, documents: Sequence[Document]) -> Sequence[Document]:
        return self.transform_documents(documents)

    def _done(self, documents: Sequence[Document], report: rc.PrecomputeReport) -> Sequence[Document]:
        return with_handles(documents, report.handles) if self.handles else list(documents)


class LangChainAdapter:
    """Adapter of LangChain's objects for `rc.RagCache.precompute` and `rc.attach`."""

    def documents(self, given: Any) -> Iterable[rc.Document]:
        """Return the documents of an object. Raises ConfigError if the object does not give them."""
        if isinstance(given, Document):
            return [_passage(given)]
        parts = [getattr(given, "vectorstore", None), *(getattr(given, "retrievers", None) or ())]
        inner = [part for part in parts if isinstance(part, VectorStore | BaseRetriever)]
        if isinstance(given, BaseRetriever) and inner:
            return (document for part in inner for document in self.documents(part))
        found = _held(given)
        if found is None:
            raise ConfigError(
                f"a {type(given).__name__} does not say which documents it holds; give the documents themselves, or "
                "add them through ragcache.attach(store, kb)"
            )
        return found

    def holder(self, given: Any) -> Any:
        inner = getattr(given, "vectorstore", None)
        found = inner if isinstance(given, BaseRetriever) and isinstance(inner, VectorStore) else given
        return None if isinstance(found, Document) else found

    def hooks(self, given: Any, attachment: rc.Attachment) -> Mapping[str, rc.Hook]:
        """Return the hooks for an object's methods. Raises ConfigError for any option, and for an object that is
        neither a store nor a retriever.
        """
        if attachment.options:
            raise ConfigError(f"attach takes no {', '.join(attachment.options)} for objects of LangChain")
        if not isinstance(given, VectorStore | BaseRetriever):
            raise ConfigError(f"a {type(given).__name__} cannot be attached; give a vector store or a retriever")
        found = rc.Hook(partial(_found, attachment))
        hooks = {name: found for name in dir(type(given)) if name in _RELEVANT or _FINDS.match(name)}
        hooks |= {name: rc.Hook(None, clean=clean) for name in dir(type(given)) if _CHANGES.match(name)}
        hooks |= {name: rc.Hook(partial(_added, attachment), clean=clean) for name in _ADDS if hasattr(given, name)}
        if isinstance(given, VectorStore):
            hooks |= {name: rc.Hook(partial(_deleted, attachment), _texts) for name in _DELETES}
        return hooks


ADAPTER = LangChainAdapter()


def _found(attachment: rc.Attachment, _: Any, result: Any, arguments: Mapping[str, Any]) -> Any:
    """Return the result with handles in its documents, or in tuples that begin with a document."""
    rows = result if isinstance(result, list) else []
    documents = [row[0] if isinstance(row, tuple) and row else row for row in rows]
    if not documents or not all(isinstance(one, Document) for one in documents):
        return result
    named = with_handles(documents, attachment.handles(map(_passage, documents)))
    return [(one, *row[1:]) if isinstance(row, tuple) else one for one, row in zip(named, rows, strict=True)]


def _added(attachment: rc.Attachment, _: Any, ids: Any, arguments: Mapping[str, Any]) -> Any:
    documents = arguments.get("documents")
    if documents is None:
        texts, metadatas = list(arguments.get("texts") or ()), list(arguments.get("metadatas") or ())
        documents = [_document(text, about) for text, about in zip_longest(texts, metadatas[: len(texts)])]
    named = ids if isinstance(ids, list) and len(ids) == len(documents) else [""] * len(documents)
    attachment.add(to_passage(one, str(id)) for id, one in zip(named, documents, strict=True))
    return ids


def _texts(store: Any, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the texts about to be deleted, if the store returns them."""
    try:
        return {"texts": [one.page_content for one in store.get_by_ids(list(arguments.get("ids") or ()))]}
    except Exception:  # many stores cannot, and raise any error; the ids are known anyway
        return {"texts": []}


def _deleted(attachment: rc.Attachment, store: Any, result: Any, arguments: Mapping[str, Any]) -> Any:
    ids = arguments.get("ids")
    if ids is None:  # the store decides which documents it deletes: those that it still holds stay
        attachment.sync(store)
    else:
        attachment.forget(map(str, ids), given=arguments["texts"])
    return result


def _passage(document: Document) -> rc.Document:
    return to_passage(document, document.id or "")


def _document(text: str, metadata: Any) -> Document:
    """Return a document made of a store's text and metadata."""
    return Document(page_content=text, metadata=dict(metadata) if isinstance(metadata, Mapping) else {})


def _held(store: Any) -> Iterable[rc.Document] | None:
    """Return the documents of a store or retriever, as LangChain's and its usual partners' classes keep them; None:
    unknown.
    """
    if isinstance(held := getattr(store, "store", None), dict):  # InMemoryVectorStore
        rows = list(held.values())
        rows = [row for row in rows if isinstance(row, dict) and "text" in row]
        return (to_passage(_document(row["text"], row.get("metadata")), str(row["id"])) for row in rows)
    if isinstance(held := getattr(getattr(store, "docstore", None), "_dict", None), dict):  # FAISS
        return (to_passage(one, str(id)) for id, one in list(held.items()))
    if isinstance(held := getattr(store, "docs", None), list):  # keyword retrievers
        return map(_passage, held)
    held = store.get() if hasattr(store, "get") else None
    if isinstance(held, dict) and {"ids", "documents"} <= held.keys():  # Chroma
        parts = zip_longest(held["ids"], held["documents"], held.get("metadatas") or ())
        return (to_passage(_document(text, about), str(id)) for id, text, about in parts if text)
    return None


def with_handles(documents: Sequence[Document], handles: Sequence[str | None]) -> list[Document]:
    """Return copies of the documents with their handles in the metadata; a handle of None removes an earlier handle."""
    pairs = zip(documents, handles, strict=True)
    about = [(one, without_handle(one.metadata), handle) for one, handle in pairs]
    return [
        one.model_copy(update={"metadata": known if handle is None else {**known, HANDLE_KEY: handle}})
        for one, known, handle in about
    ]
