"""Training sequences and attention as KVLink's and TurboRAG's papers describe them, token by token.

Written from the papers' text: every token states its part, and `may_see` is a chain of sentences. Nothing of
`ragcache_train` is used.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ragcache.models.trained_tokens import TrainedTokens


class Tok(NamedTuple):
    """A token.

    part:   "prefix", "start", "chunk", "link", "end" or "question"
    number: of the chunk or question, from 0
    """

    id: int
    part: str
    number: int
    position: int


def linked(
    prefix: Sequence[int],
    chunks: Sequence[Sequence[int]],
    questions: Sequence[Sequence[int]],
    links: Sequence[Sequence[int]],
    start: int | None = None,
    end: int | None = None,
) -> list[Tok]:
    """Return KVLink's sequence (figure 4): system, KV-START, documents with link tokens, KV-END, the question."""
    found: list[tuple[int, str, int]] = [(i, "prefix", 0) for i in prefix]
    found += [] if start is None else [(start, "start", 0)]
    for number, chunk in enumerate(chunks):
        found += [(i, "chunk", number) for i in chunk]
        found += [(i, "link", number) for i in links[number]]
    found += [] if end is None else [(end, "end", 0)]
    tokens = [Tok(*token, position) for position, token in enumerate(found)]
    return tokens + _questions(questions, len(tokens))


def marked(
    prefix: Sequence[int],
    chunks: Sequence[Sequence[int]],
    questions: Sequence[Sequence[int]],
    markers: tuple[int, int],
    composite: bool,
) -> list[Tok]:
    """Return TurboRAG's sequence: each document between markers; composite positions start again at each document."""
    tokens = [Tok(i, "prefix", 0, position) for position, i in enumerate(prefix)]
    behind = [len(prefix)]
    for number, chunk in enumerate(chunks):
        first = len(prefix) if composite else behind[-1]
        ids = [markers[0], *chunk, markers[1]]
        tokens += [Tok(i, "chunk", number, first + offset) for offset, i in enumerate(ids)]
        behind.append(first + len(ids))
    return tokens + _questions(questions, max(behind))


def apart(
    spec: TrainedTokens, prefix: Sequence[int], chunks: Sequence[Sequence[int]], questions: Sequence[Sequence[int]]
) -> list[Tok]:
    """Return the sequence of a way of reuse, with the ids that it was trained with."""
    if spec.method == "markers":
        return marked(prefix, chunks, questions, (spec.doc_start_id, spec.doc_end_id), spec.positions == "composite")
    if spec.method == "reposition" or not chunks:
        return linked(prefix, chunks, questions, [[]] * len(chunks))
    links = [spec.link_ids(slot) for slot in range(len(chunks))]
    return linked(prefix, chunks, questions, links, spec.kv_start_id, spec.kv_end_id)


def together(prefix: Sequence[int], chunks: Sequence[Sequence[int]], questions: Sequence[Sequence[int]]) -> list[Tok]:
    """Return the standard encoding, a single text: chunk tokens count as prefix, so they see all tokens before them."""
    ids = [*prefix, *(i for chunk in chunks for i in chunk)]
    tokens = [Tok(i, "prefix", 0, position) for position, i in enumerate(ids)]
    return tokens + _questions(questions, len(ids))


def _questions(questions: Sequence[Sequence[int]], first: int) -> list[Tok]:
    return [
        Tok(i, "question", number, first + offset)
        for number, ids in enumerate(questions)
        for offset, i in enumerate(ids)
    ]


def may_see(
    tokens: Sequence[Tok], query: int, key: int, window: int | None = None, behind_prefix: bool = False
) -> bool:
    """Return whether the token at place `query` attends to the token at place `key`.

    behind_prefix: whether documents were encoded after the prefix (and KV-START), which they then see
    """
    reader, read = tokens[query], tokens[key]
    if key > query:
        return False  # no token sees later tokens
    if window is not None and reader.position - read.position >= window:
        return False
    if behind_prefix and reader.part == "chunk" and read.part in ("prefix", "start"):
        return True
    if reader.part == "chunk":  # documents keep their local causal attention
        return read.part == "chunk" and read.number == reader.number
    if read.part == "question":  # a question is seen by its own tokens only
        return reader.part == "question" and read.number == reader.number
    return True  # link tokens, questions and the rest see everything before them


def allowed(tokens: Sequence[Tok], window: int | None = None, behind_prefix: bool = False) -> Tensor:
    """Return `may_see` for every pair of tokens, bool [n, n]."""
    places = range(len(tokens))
    return torch.tensor([[may_see(tokens, query, key, window, behind_prefix) for key in places] for query in places])
