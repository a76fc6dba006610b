"""How much of its passages' KV a prompt finds, whoever built it: python -m benchmarks.reuse

For each way to ask, the share of the passages' tokens that did not run: at the first question, at the same one again,
at another one over the same passages in another order, and at that after closing and opening the store. Then
conversations: the tokens that ran beside the new turn's own, at most over all turns from the second on, in one process
and with the store closed between the turns. Then the look-up alone, over 100,000 passages. The passages are sections of
this repository's documentation.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import ragcache as rc
from ragcache.engine.content_index import ContentIndex
from ragcache.models.language_model import LanguageModel
from ragcache.prompt import encode_text
from ragcache.retrieval.fake import BagOfWords

SYSTEM = "Answer from the context, in one sentence.\n\n"
QUESTIONS = ("How is a block kept on disk?", "What may be deleted?")
ONE = rc.Sampling(max_tokens=1)
Ask = Callable[[rc.RagCache, Sequence[str], str], rc.Answer]
Keep = Callable[[rc.RagCache, Sequence[str]], object]


def sections(count: int, characters: int) -> list[str]:
    """Passages of about so many characters, cut at lines."""
    text = (Path(__file__).parent.parent / "docs" / "storage.md").read_text()
    found, current = list[str](), ""
    for line in text.splitlines(keepends=True):
        current += line
        if len(current) >= characters:
            found.append(current.strip())
            current = ""
    return found[:count]


def stuffed(kb: rc.RagCache, passages: Sequence[str], question: str) -> rc.Answer:
    """LangChain's stuff chain: passages joined by empty lines in the system message."""
    content = SYSTEM + "\n\n".join(passages)
    return kb.chat([{"role": "system", "content": content}, {"role": "user", "content": question}], sampling=ONE)


def tool_result(kb: rc.RagCache, passages: Sequence[str], question: str) -> rc.Answer:
    """Passages under labels in a user message, as agents and LlamaIndex's synthesizers write them."""
    labelled = "\n\n".join(f"[{rank}] file_path: docs/a.md\n\n{text}" for rank, text in enumerate(passages, 1))
    return kb.chat([{"role": "user", "content": f"{labelled}\n\nQuestion: {question}"}], sampling=ONE)


def fused(kb: rc.RagCache, passages: Sequence[str], question: str) -> rc.Answer:
    """The fused chain: each passage a part of the message."""
    return kb.chat([{"role": "user", "content": [*map(rc.Passage, passages), question]}], sampling=ONE)


def retrieved(kb: rc.RagCache, passages: Sequence[str], question: str) -> rc.Answer:
    hits = [rc.Passage(id=text[:20]) for text in passages]
    return kb.ask(question, hits=hits, sampling=ONE)


def raw(kb: rc.RagCache, passages: Sequence[str], question: str) -> rc.Answer:
    """A prompt without a chat template, as completion clients write it."""
    return kb.complete("\n\n".join([SYSTEM, *passages, f"Question: {question}\nAnswer:"]), sampling=ONE)


def stored(kb: rc.RagCache, passages: Sequence[str]) -> None:
    kb.ingest([rc.Document(text[:20], text) for text in passages], split=False)


def precomputed(kb: rc.RagCache, passages: Sequence[str]) -> None:
    """KV alone, for documents that are elsewhere."""
    kb.precompute(passages)


def share(kb: rc.RagCache, answer: rc.Answer, passages: Sequence[str]) -> float:
    """Share of the passages' tokens that did not run."""
    tokens = sum(kb.count_tokens(text) for text in passages)
    if not answer.hits:  # none was found: what is cached is a prefix
        return min(1.0, answer.usage.cached_tokens / tokens)
    reused = sum(hit.chunk.num_tokens for hit in answer.hits if hit.kv not in ("computed", "unused"))
    return min(1.0, reused / tokens)


def row(
    lm: LanguageModel,
    passages: Sequence[str],
    ask: Ask,
    keep: Keep | None,
    before: Ask | None = None,
    method: str | None = "reposition",
) -> list[float]:
    """Shares of one way to ask. before: what had been asked in that store, by another way"""
    with tempfile.TemporaryDirectory() as root:
        opened = partial(rc.RagCache.open, Path(root) / "kb", model=lm, embedder=BagOfWords(), method=method)
        with opened() as kb:
            if keep is not None:
                keep(kb, passages)
            if before is not None:
                before(kb, passages, QUESTIONS[0])
            first, again = (share(kb, ask(kb, passages, QUESTIONS[0]), passages) for _ in range(2))
            other = share(kb, ask(kb, passages[::-1], QUESTIONS[1]), passages)
        with opened() as kb:
            return [first, again, other, share(kb, ask(kb, passages, QUESTIONS[1]), passages)]


def plain_chat() -> Iterator[list[dict[str, Any]]]:
    """What the user says in each turn."""
    for question in (
        "What grows in the shade of a north wall?",
        "And what in full sun, where the soil is dry and stony?",
        "How often should I water these in July?",
        "Name a tree that stays below three metres.",
        "Thank you. What did I ask first?",
    ):
        yield [{"role": "user", "content": question}]


def agent_loop() -> Iterator[list[dict[str, Any]]]:
    """A question, and what a tool found for each of the model's calls."""
    yield [{"role": "user", "content": "Compare what the pages say about disks."}]
    for rank, text in enumerate(sections(5, 500)):
        yield [{"role": "user", "content": f"Result of the search, page {rank}:\n{text}"}]


Turns = Callable[[], Iterator[list[dict[str, Any]]]]


def late(lm: LanguageModel, turns: Turns, method: str | None, *, closed: bool) -> tuple[int, int, float]:
    """Tokens of the last prompt; tokens that ran beside a turn's own, at most; share of the earlier tokens cached."""
    with tempfile.TemporaryDirectory() as root:
        opened = partial(rc.RagCache.open, Path(root) / "kb", model=lm, embedder=BagOfWords(), method=method)
        messages: list[dict[str, Any]] = [{"role": "system", "content": "You answer in one or two sentences."}]
        kb, before, ran, known = opened(), 0, list[int](), 0
        for turn in turns():
            messages += turn
            answer = kb.chat(messages, sampling=rc.Sampling(max_tokens=40))
            ran.append(before - answer.usage.cached_tokens)
            known += before
            before = answer.usage.prompt_tokens + answer.usage.completion_tokens
            messages.append({"role": "assistant", "content": answer.text})
            if closed:
                kb.close()
                kb = opened()
        kb.close()
    return answer.usage.prompt_tokens, max(ran), 1 - sum(ran) / known


def look_up(count: int = 100_000) -> str:
    random = np.random.default_rng(0)
    passages = random.integers(0, 49152, (count, 250))
    index, times = ContentIndex(), list[float]()
    index.add(enumerate(passages))
    for _ in range(100):
        chosen = random.integers(0, count, 60)
        ids = np.concatenate(
            [part for n in chosen for part in (random.integers(0, 49152, 15), passages[n][1:-1])]
        ).tolist()
        started = time.perf_counter()
        found = index.find(ids)
        times.append(time.perf_counter() - started)
        if [one.name for one in found[:60]] != chosen.tolist():
            raise SystemExit("a passage was not found, or another one was")
    return (
        f"{len(ids)} tokens, {count} passages: median {np.median(times) * 1e3:.1f} ms, most {max(times) * 1e3:.1f} ms"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="mini", help="bundled name or directory")
    parser.add_argument("--passages", type=int, default=4)
    parser.add_argument("--characters", type=int, default=700)
    chosen = parser.parse_args()
    lm, passages = rc.load_lm(chosen.model), sections(chosen.passages, chosen.characters)
    ways: list[tuple[str, Ask, Keep | None, Ask | None]] = [
        ("stuff chain, documents nowhere", stuffed, None, None),
        ("fused chain, documents nowhere", fused, None, None),
        ("stuff chain, after a fused one", stuffed, None, fused),
        ("stuff chain, documents precomputed", stuffed, precomputed, None),
        ("labelled text, documents precomputed", tool_result, precomputed, None),
        ("stuff chain, documents also in ragcache", stuffed, stored, None),
        ("labelled text, documents also in ragcache", tool_result, stored, None),
        ("fused chain, documents in ragcache", fused, stored, None),
        ("ragcache's own passages", retrieved, stored, None),
    ]
    exact: list[tuple[str, Ask, Keep | None]] = [
        ("stuff chain", stuffed, None),
        ("labelled text, as LlamaIndex and agents write it", tool_result, None),
        ("fused chain", fused, None),
        ("a raw prompt", raw, None),
        ("ragcache's own passages", retrieved, stored),
    ]
    print(f"Passages of {[lm_tokens(lm, text) for text in passages]} tokens, {lm.name.rpartition('/')[2]}, CPU.\n")
    print("| | 1st | again | other question, other order | after opening again |\n|---|---|---|---|---|")
    for name, ask, keep, before in ways:
        print(f"| {name} | " + " | ".join(f"{one:.1%}" for one in row(lm, passages, ask, keep, before)) + " |")
    for name, ask, keep in exact:
        shares = row(lm, passages, ask, keep, None, None)
        print(f"| {name}, method by default | " + " | ".join(f"{one:.1%}" for one in shares) + " |")
    print(
        "\n| conversation | prompt at the end | most tokens run beside the turn's own | cached | the same, closed | |"
    )
    print("|---|---|---|---|---|---|")
    for label, turns in (("plain chat", plain_chat), ("agent's loop", agent_loop)):
        for method in (None, "reposition"):
            (length, most, share_here), (_, again, share_closed) = (
                late(lm, turns, method, closed=closed) for closed in (False, True)
            )
            name = f"{label}, {method or 'method by default'}"
            print(f"| {name} | {length} | {most} | {share_here:.1%} | {again} | {share_closed:.1%} |")
    print(f"\nLook-up: {look_up()}")


def lm_tokens(lm: LanguageModel, text: str) -> int:
    return len(encode_text(lm.tokenizer, text))


if __name__ == "__main__":
    main()
