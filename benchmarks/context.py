"""Share of changing prompts that is found in KV, against prefix caching alone: `python -m benchmarks context`.

A scripted day over a store without documents. Chats are written as Open WebUI sends them: the time and the user's
memories are in the system message, and sources are in tags, in the order of their relevance. A research agent's prompts
have a status line that changes with every step, and results of tools, of which the oldest are dropped and the next are
shortened. Each request goes to a store that learns passages from prompts, and to a store with prefix caching alone.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import ragcache as rc
from benchmarks.report import Result, where_line
from benchmarks.reuse import ONE, QUESTIONS, in_context, learn, sections
from benchmarks.runner import Run
from ragcache.models.language_model import LanguageModel
from ragcache_demo.bag_of_words import BagOfWords

Messages = list[dict[str, Any]]
CHATS, AGENT = "chats", "research agent"
SMOOTH = 5
"""A point of the picture is the mean share over its request and this many earlier requests."""


@dataclass(frozen=True)
class Settings:
    """model: bundled name or directory; documents: number of documents, of `characters` characters each, `in_prompt` of
    them in a prompt; chats, steps: number of requests of the chats and of the agent"""

    model: str = "mini"
    documents: int = 8
    characters: int = 700
    in_prompt: int = 3
    chats: int = 36
    steps: int = 24


def chats(settings: Settings, pages: Sequence[str], chance: random.Random) -> Iterator[Messages]:
    """Yield the requests of Open WebUI's chats."""
    memories = ["The user lives in Lyon.", "The user prefers short answers."]
    for number in range(settings.chats):
        if number % 5 == 4:
            memories.append(f"The user asked about page {number}.")
        now = f"It is {8 + number // 5}:{10 + number % 5 * 10}. Memories: {' '.join(memories[-3:])}"
        asked = in_context(chance.sample(pages, settings.in_prompt), QUESTIONS[1 + number % 3])
        yield [{"role": "system", "content": now}, {"role": "user", "content": asked}]


def research(settings: Settings, pages: Sequence[str], chance: random.Random) -> Iterator[Messages]:
    """Yield the requests of an agent, whose results move, shrink to their first half, and are dropped."""
    results: list[str] = []
    for step in range(settings.steps):
        results.append(chance.choice(pages))
        kept = results[-settings.in_prompt :]
        shown = [text[: len(text) // 2] if rank == 0 and step % 4 == 3 else text for rank, text in enumerate(kept)]
        told = "\n".join(f"<result>\n{text}\n</result>" for text in shown)
        yield [
            {"role": "system", "content": f"Step {step + 1} of {settings.steps}. You compare what pages say."},
            {"role": "user", "content": f"{told}\n\nWhat is missing?"},
        ]


def counts(lm: LanguageModel, run: Run, day: Sequence[tuple[str, Messages]], way: Any) -> list[tuple[int, int]]:
    """Return, for each request, the prompt's tokens and the tokens found. way: see `StoreConfig.learn`"""
    found, config = list[tuple[int, int]](), rc.StoreConfig(learn=way, load="always")
    root = run.workdir / way
    with rc.RagCache.open(root, model=lm, embedder=BagOfWords(), method="reposition", store=config) as kb:
        for _, messages in day:
            usage = kb.chat(messages, sampling=ONE).usage
            learn(kb)
            found.append((usage.prompt_tokens, usage.cached_tokens))
    return found


def share(found: Sequence[tuple[int, int]]) -> float:
    """Return the share of all requests' tokens that was found."""
    return sum(cached for _, cached in found) / sum(tokens for tokens, _ in found)


def measure(settings: Settings, run: Run) -> Result:
    lm, chance = rc.load_lm(settings.model), random.Random(0)
    pages = sections(settings.documents, settings.characters)
    asked = [(CHATS, one) for one in chats(settings, pages, chance)]
    steps = [(AGENT, one) for one in research(settings, pages, chance)]
    day = [one for pair in zip_longest(asked, steps) for one in pair if one is not None]
    ways = {"learnt passages": counts(lm, run, day, "second"), "prefixes alone": counts(lm, run, day, "off")}
    rows: list[list[Any]] = []
    for kind in (CHATS, AGENT, "the day"):
        own = {
            way: [one for one, (of, _) in zip(found, day, strict=True) if kind in (of, "the day")]
            for way, found in ways.items()
        }
        tokens = sum(tokens for tokens, _ in own["prefixes alone"])
        rows.append([kind, tokens, *map(share, own.values())])
    rank = range(len(day))
    series = {way: [share(found[max(0, at - SMOOTH) : at + 1]) for at in rank] for way, found in ways.items()}
    return run.result(figures={"shares": rows, "ways": list(ways), "series": series})


def markdown(found: Mapping[str, Any]) -> list[str]:
    """Return the table of a result's file."""
    figures, settings = found["figures"], found["settings"]
    lines = [
        where_line(found),
        f"{settings['documents']} documents of {settings['characters']} characters, {settings['model']}, `reposition`.",
        "",
        f"| requests | prompt tokens | {' | '.join(figures['ways'])} |",
        "|---|---|---|---|",
    ]
    for kind, tokens, *own in figures["shares"]:
        lines.append(f"| {kind} | {tokens:,} | {' | '.join(f'{one:.1%}' for one in own)} |")
    return lines
