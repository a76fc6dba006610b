"""Questions over the registry that the bundled model was trained on: entities and wordings that it has not seen.

The same seed gives the same questions in every process.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from ragcache.errors import ConfigError
from ragcache_eval.case import Case, CasePassage
from ragcache_eval.registry.contexts import KINDS, draw_texts
from ragcache_eval.registry.names import DataSplit
from ragcache_eval.registry.pages import PAGE_KINDS, PageQuestion, Pages, draw_pages
from ragcache_eval.settings import check_setting


@dataclass(frozen=True)
class RegistrySettings:
    """Settings of `registry_cases`.

    kind:      "plain", or "leaning": a passage makes sense only with the passage before it
    hops:      passages that the answer needs, 1 or 2
    passages:  passages in a context; several numbers (3/8/16) make a cell each
    positions: positions of the gold passage (0/3/7), with a cell each; (): anywhere. Plain single-hop questions only
    """

    kind: str = "plain"
    hops: int = 1
    passages: tuple[int, ...] = (8,)
    positions: tuple[int, ...] = ()
    questions: int = 100
    seed: int = 0

    def __post_init__(self) -> None:
        check_setting("kind", self.kind, KINDS)
        check_setting("hops", str(self.hops), ("1", "2"))
        if self.questions < 1 or min(self.passages) < 2:
            raise ConfigError("registry needs at least 1 question and 2 passages")
        if self.positions and (self.hops != 1 or self.kind != "plain"):
            raise ConfigError("positions move one gold passage; they go with kind=plain and hops=1")


def registry_cases(settings: RegistrySettings, limit: int | None = None) -> list[Case]:
    """Return the cases. `limit` overrides `settings.questions`."""
    count = limit or settings.questions
    found = []
    for passages in settings.passages:
        cases = _cases(settings, passages, count)
        if settings.positions:
            cases = [case.with_gold_at(place) for case in cases for place in settings.positions]
        found += cases
    return found


def _cases(settings: RegistrySettings, passages: int, count: int) -> list[Case]:
    drawn = draw_texts(
        num_cases=count, hops=settings.hops, kind=settings.kind, num_passages=passages, seed=settings.seed
    )
    name = "leaning" if settings.kind == "leaning" else f"{settings.hops}hop"
    cell: dict[str, str | int] = {"passages": passages, "question": name}
    cases = []
    for number, text in enumerate(drawn):
        marked = tuple(CasePassage(one, is_gold=rank in text.gold) for rank, one in enumerate(text.passages))
        id = f"registry-{name}-{passages}-{number:04d}"
        cases.append(Case(id, text.question.text, marked, (text.question.answer,), cell=cell))
    return cases


@dataclass(frozen=True)
class PagesSettings:
    """Settings of `pages_cases`.

    kind:     one of PAGE_KINDS
    passages: pages in a context; several numbers (8/16) make a cell each
    asked:    most questions over the same context
    """

    kind: str = "single"
    passages: tuple[int, ...] = (8,)
    questions: int = 100
    seed: int = 0
    asked: int = 1

    def __post_init__(self) -> None:
        check_setting("kind", self.kind, PAGE_KINDS)
        if self.questions < 1 or min(self.passages) < 2 or self.asked < 1:
            raise ConfigError("pages needs at least 1 question, of a context too, and 2 passages")


def pages_cases(settings: PagesSettings, limit: int | None = None) -> list[Case]:
    """Return questions over contexts of long passages, grouped by context; names and all wordings are held out.

    `limit` overrides `settings.questions`. An answer is right if it contains the requested value; the whole sentence
    that the bundled models learned follows it in `Case.answers`.
    """
    count = limit or settings.questions
    return [case for passages in settings.passages for case in _pages(settings, passages, count)]


def _pages(settings: PagesSettings, passages: int, count: int) -> list[Case]:
    rng = random.Random(f"pages/{settings.seed}/{settings.kind}/{passages}")
    cases: list[Case] = []
    while len(cases) < count:
        pages = draw_pages(rng, passages, DataSplit.HELD_OUT, DataSplit.HELD_OUT)
        found = [one for one in pages.questions if one.kind == settings.kind]
        context = f"pages-{settings.kind}-{passages}-{len(cases):04d}"
        for asked in rng.sample(found, min(settings.asked, len(found), count - len(cases))):
            cases.append(_page_case(asked, pages, f"pages-{settings.kind}-{passages}-{len(cases):04d}", context))
    return cases


def _page_case(asked: PageQuestion, pages: Pages, id: str, context: str) -> Case:
    cell: dict[str, str | int] = {"passages": len(pages.passages), "question": asked.kind}
    if asked.kind == "leaning":
        cell |= {"place": asked.place, "candidates": asked.candidates}
    marked = tuple(
        CasePassage(text, is_gold=rank in asked.gold, behind=pages.before(rank))
        for rank, text in enumerate(pages.passages)
    )
    answers = (asked.question.value, asked.question.answer)
    return Case(id, asked.question.text, marked, answers, question_id=context, cell=cell)
