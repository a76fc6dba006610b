"""Share of the passages' KV that a prompt finds, built by ragcache or by others: `python -m benchmarks reuse`.

For each way to ask, this is the share of the passages' tokens whose KV was found: at the first question, at the same
question again, at another question over the same passages in another order, at a third in a third order, and at a last
question after the store was closed and opened. The ways to ask are objects of LangChain, LlamaIndex, OpenAI and
Anthropic, and ragcache's own; passages that the store does not have are learnt from the prompts. Some methods run a
part of the found tokens again, as `epic` does with the first tokens of each piece: a second table has the cached
tokens.

Then follow conversations: the most tokens that ran beyond a turn's own, over all turns from the second on, in a single
process and with the store closed between turns. The passages are sections of this repository's documentation. A run
that was killed goes on with the next way to ask.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import numpy as np
from anthropic import Anthropic
from langchain_core.documents import Document
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnablePassthrough
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events.llm import LLMChatEndEvent, LLMCompletionEndEvent
from llama_index.core.response_synthesizers import ResponseMode, get_response_synthesizer
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index_instrumentation import get_dispatcher
from openai import OpenAI
from pydantic import Field
from starlette.testclient import TestClient

import ragcache as rc
from benchmarks.report import Result, where_line
from benchmarks.runner import Run
from langchain_ragcache import ChatRagCache, create_fused_documents_chain
from llama_index.llms.ragcache import RagCacheLLM
from ragcache.engine.caches.content_index import EDGE
from ragcache.engine.kv_lookup import UNUSED, KVLookup, ResolvedKV
from ragcache.engine.loader import COMPUTED
from ragcache.engine.request import Request
from ragcache.kv.buffers import SharedContext
from ragcache.models.language_model import LanguageModel
from ragcache.prompt import encode_text
from ragcache.server.app import create_app
from ragcache_demo.bag_of_words import BagOfWords

SYSTEM = "Answer from the context, in one sentence.\n\n"
FIRST = "How is a block kept on disk?"
QUESTIONS = (FIRST, FIRST, "What may be deleted?", "Who may read a document?")
ONE = rc.Sampling(max_tokens=1)
METHODS = (None, "reposition")
Ask = Callable[[rc.RagCache, Sequence[str], str], dict[str, Any]]
"""Returns the answer as JSON, with `usage.cached_tokens`."""
Keep = Callable[[rc.RagCache, Sequence[str]], object]


def sections(count: int, characters: int) -> list[str]:
    """Return passages of about this many characters, cut at lines."""
    text = (Path(__file__).parent.parent / "docs" / "storage.md").read_text()
    found, current = list[str](), ""
    for line in text.splitlines(keepends=True):
        current += line
        if len(current) >= characters:
            found.append(current.strip())
            current = ""
    return found[:count]


STUFFED = ChatPromptTemplate.from_messages([("system", SYSTEM + "{context}"), ("human", "{input}")])


def stuffed(kb: rc.RagCache, passages: Sequence[str], question: str) -> dict[str, Any]:
    """Ask through LangChain's stuff chain, which joins passages by empty lines in the system message."""
    chain = STUFFED | ChatRagCache(kb=kb, max_tokens=1)
    return _of_message(chain.invoke({"context": "\n\n".join(passages), "input": question}))


def fused(kb: rc.RagCache, passages: Sequence[str], question: str) -> dict[str, Any]:
    """Ask through the fused chain, in which each document is a content block of the message."""
    chain = create_fused_documents_chain(
        ChatRagCache(kb=kb, max_tokens=1), STUFFED, output_parser=cast("Any", RunnablePassthrough())
    )
    return _of_message(chain.invoke({"context": [Document(text) for text in passages], "input": question}))


def _of_message(message: Any) -> dict[str, Any]:
    cached = message.usage_metadata["input_token_details"]["cache_read"]
    return {"usage": {"cached_tokens": cached}}


class LastAnswer(BaseEventHandler):
    """Keeps the model's output at the end of LlamaIndex's last call, as `RagCacheLLM` puts it into `raw`."""

    raw: dict[str, Any] = Field(default_factory=dict)

    def handle(self, event: Any, **_: Any) -> None:
        if isinstance(event, LLMChatEndEvent | LLMCompletionEndEvent) and event.response is not None:
            self.raw = dict(event.response.raw or {})


HEARD = LastAnswer()
get_dispatcher().add_event_handler(HEARD)


def compact(kb: rc.RagCache, passages: Sequence[str], question: str) -> dict[str, Any]:
    """Ask through LlamaIndex's own synthesizer, over nodes of a user's index, each below its file's name."""
    nodes = [NodeWithScore(node=TextNode(text=text, metadata={"file_path": "docs/a.md"})) for text in passages]
    llm = RagCacheLLM(kb, max_tokens=1)
    get_response_synthesizer(llm=llm, response_mode=ResponseMode.COMPACT).synthesize(question, nodes)
    return HEARD.raw


def served(kb: rc.RagCache, messages: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Ask by OpenAI's client over a server, without retrieval."""
    with TestClient(create_app(kb)) as http:
        client = OpenAI(base_url="http://testserver/v1", api_key="none", http_client=http)
        model = client.models.list().data[1].id  # NAME:plain, without retrieval
        made = client.chat.completions.create(model=model, messages=cast("Any", messages), max_tokens=1)
    return {"usage": made.model_dump()["usage"]["prompt_tokens_details"]}


def labelled(kb: rc.RagCache, passages: Sequence[str], question: str) -> dict[str, Any]:
    """Ask by OpenAI's client, with passages below labels in a user message."""
    text = "\n\n".join(f"[{rank}] {text}" for rank, text in enumerate(passages, 1))
    return served(kb, [{"role": "user", "content": f"{text}\n\nQuestion: {question}"}])


def in_context(passages: Sequence[str], question: str) -> str:
    """Return the message that Open WebUI makes of a question and the passages that it retrieved itself."""
    sources = "\n".join(f'<source id="{rank}" name="page.md">{text}</source>' for rank, text in enumerate(passages, 1))
    return f"Answer from the context; cite sources as [id].\n\n<context>\n{sources}\n</context>\n\n{question}"


def open_webui(kb: rc.RagCache, passages: Sequence[str], question: str) -> dict[str, Any]:
    """Ask with a message of Open WebUI's own retrieval, over OpenAI's route."""
    return served(kb, [{"role": "user", "content": in_context(passages, question)}])


def remembering(kb: rc.RagCache, passages: Sequence[str], question: str) -> dict[str, Any]:
    """Ask as an agent whose memory changes with each question, and whose tool returned the passages."""
    results = [
        message
        for rank, text in enumerate(passages)
        for message in (
            {"role": "user", "content": f"Read page {rank}."},
            {"role": "user", "content": f"<tool_response>\n{text}\n</tool_response>"},
        )
    ]
    memory = f"You are an agent. Memory: the user asked {question!r} of {len(passages)} pages."
    return served(kb, [{"role": "system", "content": memory}, *results, {"role": "user", "content": question}])


def claude(kb: rc.RagCache, passages: Sequence[str], question: str) -> dict[str, Any]:
    """Ask by Anthropic's client, with passages as documents."""
    documents = [
        {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": text}} for text in passages
    ]
    content = cast("Any", [*documents, {"type": "text", "text": question}])
    with TestClient(create_app(kb)) as http:
        client = Anthropic(base_url="http://testserver", api_key="none", http_client=http)
        model = http.get("/v1/models").json()["data"][1]["id"]
        made = client.messages.create(model=model, max_tokens=1, messages=[{"role": "user", "content": content}])
    return {"usage": {"cached_tokens": made.usage.cache_read_input_tokens}}


def retrieved(kb: rc.RagCache, passages: Sequence[str], question: str) -> dict[str, Any]:
    """Ask by `RagCache.ask`, over passages of its store."""
    return kb.ask(question, hits=[rc.Passage(id=text[:20]) for text in passages], sampling=ONE).to_json()


def raw(kb: rc.RagCache, passages: Sequence[str], question: str) -> dict[str, Any]:
    """Complete a prompt without a chat template, as completion clients write it."""
    return kb.complete("\n\n".join([SYSTEM, *passages, f"Question: {question}\nAnswer:"]), sampling=ONE).to_json()


def stored(kb: rc.RagCache, passages: Sequence[str]) -> None:
    kb.ingest([rc.Document(text[:20], text) for text in passages], split=False)


def precomputed(kb: rc.RagCache, passages: Sequence[str]) -> None:
    """Compute the passages' KV alone, as for documents that are kept elsewhere."""
    kb.precompute(passages)


@contextmanager
def found_places() -> Iterator[list[tuple[list[int], set[int]]]]:
    """Yield a list that collects each prompt read meanwhile: its ids, and the places whose KV was found."""
    resolve, seen = KVLookup.resolve, list[tuple[list[int], set[int]]]()

    @contextmanager
    def watched(lookup: KVLookup, request: Request, base: SharedContext | None) -> Iterator[ResolvedKV]:
        with resolve(lookup, request, base) as resolved:
            prefix, layout, start = resolved.prefix, request.plan.layout, 0
            places = set(range(0 if prefix.exact is None or prefix.created_tokens else prefix.exact.num_tokens))
            sources = iter(resolved.sources)
            for piece in layout.pieces:
                if piece.passage is not None and next(sources).kv not in (COMPUTED, UNUSED):
                    places.update(range(start, start + len(piece.ids)))
                start += len(piece.ids)
            seen.append((layout.ids, places))
            yield resolved

    with patch.object(KVLookup, "resolve", watched):
        yield seen


def found_share(lm: LanguageModel, passages: Sequence[str], ids: Sequence[int], places: set[int]) -> float:
    """Return the share of the passages' tokens that are at places of the prompt with KV.

    Up to EDGE tokens at either end of a passage may be tokenised differently in the prompt, next to other text.
    """
    row, found, total = np.asarray(ids), 0, 0
    for own in (encode_text(lm.tokenizer, text) for text in passages):
        inner = np.asarray(own[EDGE:-EDGE])
        windows = np.lib.stride_tricks.sliding_window_view(row, len(inner))
        start = int(np.flatnonzero((windows == inner).all(axis=1))[0]) - EDGE
        found += len(places & set(range(start, start + len(own))))
        total += len(own)
    return found / total


def cached_share(lm: LanguageModel, passages: Sequence[str], answer: Mapping[str, Any]) -> float:
    """Return the cached tokens over the passages' tokens, at most 1; tokens before the passages count, too."""
    return min(1.0, float(answer["usage"]["cached_tokens"]) / sum(passage_tokens(lm, passages)))


def passage_tokens(lm: LanguageModel, passages: Sequence[str]) -> list[int]:
    return [len(encode_text(lm.tokenizer, text)) for text in passages]


def learn(kb: rc.RagCache) -> None:
    """Wait until passages are learnt from all prompts so far."""
    if (learner := kb._questions.learner) is not None:
        learner.wait()


def row(
    lm: LanguageModel,
    passages: Sequence[str],
    ask: Ask,
    keep: Keep | None,
    before: Ask | None,
    method: str | None,
) -> list[tuple[float, float]]:
    """Return the found and the cached share of a way to ask, for each question.

    keep:   what the store gets before the first question; None: nothing
    before: another way to ask, which asks the first question earlier
    """

    def asked(kb: rc.RagCache, order: Sequence[str], question: str) -> tuple[float, float]:
        with found_places() as seen:
            answer = ask(kb, order, question)
        learn(kb)
        return found_share(lm, passages, *seen[-1]), cached_share(lm, passages, answer)

    orders = [passages, passages, passages[::-1], [*passages[1::2], *passages[::2]]]
    with tempfile.TemporaryDirectory() as root:
        opened = partial(rc.RagCache.open, Path(root) / "kb", model=lm, embedder=BagOfWords(), method=method)
        opened = partial(opened, store=rc.StoreConfig(load="always"))  # found, whether worth loading or not
        with opened() as kb:
            if keep is not None:
                keep(kb, passages)
            if before is not None:
                before(kb, passages, QUESTIONS[0])
            found = [asked(kb, order, question) for order, question in zip(orders, QUESTIONS, strict=True)]
        with opened() as kb:
            return [*found, asked(kb, passages[::-1], QUESTIONS[0])]


def plain_chat() -> Iterator[list[dict[str, Any]]]:
    """Yield the user's message of each turn."""
    for question in (
        "What grows in the shade of a north wall?",
        "And what in full sun, where the soil is dry and stony?",
        "How often should I water these in July?",
        "Name a tree that stays below three metres.",
        "Thank you. What did I ask first?",
    ):
        yield [{"role": "user", "content": question}]


def agent_loop() -> Iterator[list[dict[str, Any]]]:
    """Yield the messages of each turn: a question, then a tool's result for each of the model's calls."""
    yield [{"role": "user", "content": "Compare what the pages say about disks."}]
    for rank, text in enumerate(sections(5, 500)):
        yield [{"role": "user", "content": f"Result of the search, page {rank}:\n{text}"}]


Turns = Callable[[], Iterator[list[dict[str, Any]]]]


def late(
    lm: LanguageModel, turns: Turns, method: str | None, known: Sequence[str], *, closed: bool
) -> tuple[int, int, float]:
    """Return the last prompt's tokens, the most tokens run beyond a turn's own, and the cached share of earlier tokens.

    known:  passages whose KV is computed beforehand
    closed: whether the store is closed and opened between turns
    """
    with tempfile.TemporaryDirectory() as root:
        opened = partial(rc.RagCache.open, Path(root) / "kb", model=lm, embedder=BagOfWords(), method=method)
        messages: list[dict[str, Any]] = [{"role": "system", "content": "You answer in one or two sentences."}]
        kb, before, ran, earlier = opened(), 0, list[int](), 0
        precomputed(kb, known)
        for turn in turns():
            messages += turn
            answer = kb.chat(messages, sampling=rc.Sampling(max_tokens=40))
            ran.append(max(0, before - answer.usage.cached_tokens))
            earlier += before
            before = answer.usage.prompt_tokens + answer.usage.completion_tokens
            messages.append({"role": "assistant", "content": answer.text})
            if closed:
                kb.close()
                kb = opened()
        kb.close()
    return answer.usage.prompt_tokens, max(ran), 1 - sum(ran) / earlier


@dataclass(frozen=True)
class Settings:
    """model: bundled name or directory; ways: measure only ways whose names contain this text, and no conversations;
    passages: number of passages, of `characters` characters"""

    model: str = "mini"
    ways: str = ""
    passages: int = 4
    characters: int = 700


WAYS: tuple[tuple[str, Ask, Keep | None, Ask | None], ...] = (
    ("LangChain's stuff chain, documents nowhere", stuffed, None, None),
    ("its fused chain, documents nowhere", fused, None, None),
    ("LlamaIndex's compact synthesizer, documents nowhere", compact, None, None),
    ("OpenAI's client, documents nowhere", labelled, None, None),
    ("Open WebUI's own retrieval, documents nowhere", open_webui, None, None),
    ("an agent whose memory changes, documents nowhere", remembering, None, None),
    ("Anthropic's client, documents nowhere", claude, None, None),
    ("its stuff chain, after a fused one", stuffed, None, fused),
    ("its stuff chain, documents precomputed", stuffed, precomputed, None),
    ("its stuff chain, documents also in ragcache", stuffed, stored, None),
    ("its fused chain, documents in ragcache", fused, stored, None),
    ("LlamaIndex's compact synthesizer, documents precomputed", compact, precomputed, None),
    ("the same, documents also in ragcache", compact, stored, None),
    ("OpenAI's client, documents precomputed", labelled, precomputed, None),
    ("Anthropic's client, documents precomputed", claude, precomputed, None),
    ("a raw prompt, documents precomputed", raw, precomputed, None),
    ("ragcache's own passages", retrieved, stored, None),
)


def measure(settings: Settings, run: Run) -> Iterator[Result]:
    """Yield a result after each way to ask."""
    lm, passages = rc.load_lm(settings.model), sections(settings.passages, settings.characters)
    shares, conversations = list[Any](), list[Any]()
    found: dict[str, Any] = {"shares": shares, "conversations": conversations}
    found["passage_tokens"] = passage_tokens(lm, passages)
    for name, ask, keep, before in WAYS:
        for method in METHODS if settings.ways in name else ():
            label = method or "by default"
            own = run.journal.once(f"{name}, {label}", partial(row, lm, passages, ask, keep, before, method))
            shares.append([name, label, *zip(*own, strict=True)])
            yield run.result(figures=found)
    if settings.ways:
        return
    for name, turns, known in (
        ("plain chat", plain_chat, []),
        ("agent's loop", agent_loop, []),
        ("agent's loop, its pages precomputed", agent_loop, sections(5, 500)),
    ):
        for method in METHODS:
            label = f"{name}, {method or 'method by default'}"
            both = [
                run.journal.once(f"{label}, {closed}", partial(late, lm, turns, method, known, closed=closed))
                for closed in (False, True)
            ]
            conversations.append([label, *both[0], *both[1][1:]])
            yield run.result(figures=found)


def markdown(found: Mapping[str, Any]) -> list[str]:
    """Return the tables of a result's file."""
    figures = found["figures"]
    lines = [where_line(found), f"Passages of {figures['passage_tokens']} tokens, {found['settings']['model']}."]
    for number, what in enumerate(("Share of the passages' tokens found", "Cached tokens, beside the passages'")):
        lines += ["", f"| {what} | method | 1st | again | other question, other order | third | after opening again |"]
        lines += ["|---|---|---|---|---|---|---|"]
        for name, method, *shares in figures["shares"]:
            lines.append(f"| {name} | {method} | {' | '.join(f'{one:.0%}' for one in shares[number])} |")
    heads = (
        "conversation",
        "prompt at the end",
        "most tokens run beside the turn's own",
        "cached",
        "the same, closed",
        "",
    )
    lines += ["", f"| {' | '.join(heads)} |", "|---|---|---|---|---|---|"] if figures["conversations"] else []
    for name, length, most, share_here, again, share_closed in figures["conversations"]:
        lines.append(f"| {name} | {length} | {most} | {share_here:.1%} | {again} | {share_closed:.1%} |")
    return lines
