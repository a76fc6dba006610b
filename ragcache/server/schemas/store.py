"""Models, methods, store figures, health."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ragcache.server.schemas.base import AnswerModel


class ModelItem(AnswerModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class ModelList(AnswerModel):
    object: Literal["list"]
    data: list[ModelItem]


class MethodItem(AnswerModel):
    name: str
    summary: str
    paper: str
    needs_training: bool
    usable: bool = Field(description="Whether this model and this store can run it")


class MethodList(AnswerModel):
    object: Literal["list"]
    data: list[MethodItem]


class StoreFigures(AnswerModel):
    """Counts and bytes, some seconds old at most; hits and misses over the life of the store."""

    model: str
    method: str = Field(description="What requests without a method are read by; auto: each one decides")
    embedder: str
    max_positions: int
    max_upload_bytes: int = Field(description="Largest body of POST /v1/documents")
    max_upload_files: int = Field(description="Files in one upload")
    file_kinds: list[str] = Field(description="Endings of the files that can be read, such as .md")
    documents: int
    chunks: int
    tokens: int
    pending: int
    bytes_by_tier: dict[str, int]
    hits_by_tier: dict[str, int]
    misses: int


class Health(AnswerModel):
    status: Literal["ok", "ready"]
