"""/v1/documents."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from ragcache.server.schemas.base import AnswerModel, JsonObject, Name, RequestModel, Text


class AddedDocument(RequestModel):
    id: Name = Field(description="Adding the same id again replaces the document")
    text: Text
    metadata: JsonObject = Field(default_factory=dict)
    title: Text = ""
    source: Text = ""


class AddDocuments(RequestModel):
    documents: Annotated[list[AddedDocument], Field(min_length=1, max_length=10_000)]
    split: bool = Field(True, description="false: each document is one passage, exactly as it is")


class FailedInput(AnswerModel):
    source: str
    error: str = Field(description="Why it was not stored")
    type: str = Field(description="The error's class")


class AddReport(AnswerModel):
    """Report of an addition. Inputs that could not be stored are named; the others are stored."""

    added: list[str] = Field(description="Ids of new documents")
    updated: list[str] = Field(description="Ids of replaced documents")
    unchanged: list[str] = Field(description="Ids of documents that were there already")
    failed: list[FailedInput]
    chunks: int = Field(description="Passages stored")
    tokens: int


class UploadProgress(AnswerModel):
    """An event of an upload: `read` counts inputs, `embed` passages, `encode` tokens, `commit` documents."""

    stage: str
    done: int
    total: int
    item: str


class DocumentItem(AnswerModel):
    object: Literal["document"]
    id: str
    title: str
    source: str
    chunks: int
    tokens: int
    state: Literal["ready", "pending"] = Field(description="pending: some KV is computed on first use")
    created_at: int = Field(description="Unix seconds")
    metadata: dict[str, Any]


class ChunkItem(AnswerModel):
    id: str
    text: str
    tokens: int
    handle: str | None


class DocumentDetail(DocumentItem):
    chunks_data: list[ChunkItem]


class DocumentList(AnswerModel):
    object: Literal["list"]
    data: list[DocumentItem]
    total: int = Field(description="Documents in the store that match, whatever the limit")


class DeletedDocuments(AnswerModel):
    object: Literal["list"]
    deleted: list[str] = Field(description="Ids of the documents that matched")


class DeletedDocument(AnswerModel):
    id: str
    object: Literal["document"]
    deleted: Literal[True]
