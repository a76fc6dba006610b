"""Contexts of long passages, in which some sentences mean nothing without the passage before.

A page is a passage of several articles, 150 to 300 tokens of the bundled models. Beside its articles it may hold

    a split      an article's last sentence, cut after its subject; the next page begins with the rest
    a heading    a name as the last line of a page; the next page has a statement about "she", "he" or "it", which means
                 this name. The statement is at the head of its page, or follows remarks in its middle or at its end
    a correction of a statement that an article on another page makes

All leaning sentences of a context state the same relation of entities of the same kind, so that only their place shows
whose it is: a guess is right once in `PageQuestion.candidates` times.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from ragcache_eval.registry import names, wording
from ragcache_eval.registry.contexts import passage_text
from ragcache_eval.registry.documents import Article, predicate_of, write_document, write_in_two
from ragcache_eval.registry.names import DataSplit
from ragcache_eval.registry.questions import Question, answerable_questions, single_hop
from ragcache_eval.registry.world import RELATIONS, Entity, World, draw_world

T = TypeVar("T")

PAGE_KINDS = ("single", "two-hop", "leaning", "conflicting", "unanswerable")
PLACES = ("head", "middle", "end")
ARTICLES = (5, 7)
"""Articles of a page, at least and at most."""
SPLIT_SHARE = 0.5
"""Share of the leaning sentences at a page's head that are splits; the others refer to a heading."""
REMARKS_AN_ARTICLE = 3
"""Number of remarks that are together about as long as an article."""
SPARE = 6
"""Number of entities that no page is about: unanswerable questions ask about them."""
OWN_RELATIONS = {"person": ("profession", "born"), "town": ("founded", "product")}
"""Relations whose value no other entity's article gives away. Corrections and unanswerable questions need these."""


class PageQuestion(NamedTuple):
    """A question over pages.

    kind:       one of PAGE_KINDS
    gold:       ranks of the pages that the answer needs
    place:      "leaning": where on its page the leaning sentence is; else ""
    candidates: "leaning": sentences of the context that state the relation of something named elsewhere; else 0
    reference:  "leaning": the sentence as its page has it, up to the statement about its subject, and that statement
    """

    kind: str
    question: Question
    gold: tuple[int, ...]
    place: str = ""
    candidates: int = 0
    reference: tuple[str, str] = ("", "")


class Pages(NamedTuple):
    """Texts of the pages, in order, and all questions about them.

    documents: for each page, the number of the document that it was cut from
    """

    passages: list[str]
    questions: list[PageQuestion]
    documents: list[int]

    def before(self, rank: int) -> tuple[str, ...]:
        """Return the earlier pages of the same document."""
        before = zip(self.passages[:rank], self.documents, strict=False)
        return tuple(text for text, document in before if document == self.documents[rank])


@dataclass(eq=False)
class _Page:
    items: list[str] = field(default_factory=list)
    rank: int = -1

    def insert(self, rng: random.Random, text: str, place: str) -> None:
        index = {"head": 0, "end": len(self.items)}.get(place)
        self.items.insert(rng.randint(1, max(1, len(self.items) - 1)) if index is None else index, text)


class _Leaning(NamedTuple):
    """A statement on the page after `page`, at `place`, about an entity that only `page` names."""

    entity: Entity
    page: _Page
    place: str
    reference: tuple[str, str]


def draw_pages(
    rng: random.Random,
    num_passages: int,
    entities: DataSplit = DataSplit.TRAIN,
    wordings: DataSplit = DataSplit.TRAIN,
    articles: tuple[int, int] = ARTICLES,
) -> Pages:
    """Draw `num_passages` pages, at least 2, and the questions that they answer.

    articles: of a page, at least and at most
    """
    return _Draft(rng, num_passages, entities, wordings, articles).pages()


class _Draft:
    """A context while it is being drawn."""

    def __init__(
        self, rng: random.Random, num_passages: int, split: DataSplit, wordings: DataSplit, articles: tuple[int, int]
    ) -> None:
        self.rng, self.wordings = rng, wordings
        self.articles = articles
        leaning = num_passages // 2
        self.world = _world(rng, split, num_passages * articles[1] + leaning + SPARE, leaning)
        self.groups = [[_Page(), _Page()] for _ in range(leaning)]
        self.groups += [[_Page()] for _ in range(num_passages - 2 * leaning)]
        self.chosen = self._choose(leaning)
        self.free = [name for name in self.world.entities if name not in {one.name for one in self.chosen}]
        rng.shuffle(self.free)
        self.documents: dict[str, Article] = {}
        self.where: dict[str, _Page] = {}
        for group in self.groups:
            self._fill(group[0], rng.randint(*articles))

    def pages(self) -> Pages:
        leaning = self._lean()
        corrected = self._correct()
        self.rng.shuffle(self.groups)
        pages = [page for group in self.groups for page in group]
        for rank, page in enumerate(pages):
            page.rank = rank
        asked = [*self._plain(corrected), *self._leaning(leaning), *self._unanswerable()]
        documents = [number for number, group in enumerate(self.groups) for _ in group]
        return Pages(["".join(page.items) for page in pages], asked, documents)

    def _choose(self, count: int) -> list[Entity]:
        """Draw entities of the same kind that are the subjects of leaning sentences only."""
        by_kind = {kind: [e for e in self.world.entities.values() if e.kind == kind] for kind in RELATIONS}
        kind = self.rng.choice([kind for kind, found in by_kind.items() if len(found) >= count])
        self.relation = self.rng.choice(OWN_RELATIONS.get(kind, RELATIONS[kind]))
        return self.rng.sample(by_kind[kind], count)

    def _fill(self, page: _Page, count: int) -> None:
        for _ in range(count):
            name = self.free.pop()
            document = write_document(self.rng, self.world.entities[name], wordings=self.wordings)
            self.documents[name], self.where[name] = document, page
            page.items.append(passage_text(self.rng, document))

    def _lean(self) -> list[_Leaning]:
        pairs = (group for group in self.groups if len(group) == 2)
        return [self._pair(entity, *pair) for entity, pair in zip(self.chosen, pairs, strict=True)]

    def _pair(self, entity: Entity, first: _Page, second: _Page) -> _Leaning:
        size = self.rng.randint(*self.articles)
        place = self.rng.choice(PLACES)
        if place == "head" and self.rng.random() < SPLIT_SHARE:
            head, rest = write_in_two(self.rng, entity, self.relation, self.wordings)
            first.insert(self.rng, passage_text(self.rng, head), "end")
            reference = ("", passage_text(self.rng, rest))
        else:
            mark = "# " if self.rng.random() < 0.5 else ""
            first.insert(self.rng, f"{mark}{entity.name.removeprefix('the ')}\n", "end")
            said = predicate_of(self.rng, self.relation, entity.facts[self.relation], self.wordings)
            reference = (_pronoun(entity), f" {said}.\n")
        remarks = {"head": 0, "middle": size, "end": REMARKS_AN_ARTICLE * size}[place]
        if remarks:
            texts = self._texts(wording.REMARKS, wording.HELD_OUT_REMARKS)
            second.insert(self.rng, " ".join(self.rng.choices(texts, k=remarks)) + "\n", "end")
        second.insert(self.rng, "".join(reference), "end")
        if place != "end":
            self._fill(second, size if place == "head" else max(1, size - size // REMARKS_AN_ARTICLE))
        return _Leaning(entity, first, place, reference)

    def _texts(self, trained: Sequence[T], held_out: Sequence[T]) -> Sequence[T]:
        return trained if self.wordings is DataSplit.TRAIN else held_out

    def _correct(self) -> dict[tuple[str, str], tuple[str, _Page]]:
        """Correct about a fact for every four pages, and return the value that holds and its page, by (name, relation).

        Pages that lean on another page get no correction: their "she" would then refer to the name in the correction.
        """
        pages = [group[0] for group in self.groups]
        found: dict[tuple[str, str], tuple[str, _Page]] = {}
        for _ in range(max(1, len(pages) // 2)):
            stated = [
                (name, relation)
                for name, document in self.documents.items()
                for relation in document.relations
                if relation in OWN_RELATIONS.get(self.world.entities[name].kind, ()) and (name, relation) not in found
                if self._other_values(name, relation)
            ]
            if not stated:  # few articles
                break
            name, relation = self.rng.choice(stated)
            elsewhere = [page for page in pages if page is not self.where[name]]
            if not elsewhere:
                break
            page = self.rng.choice(elsewhere)
            found[name, relation] = self.rng.choice(self._other_values(name, relation)), page
            said = predicate_of(self.rng, relation, found[name, relation][0], self.wordings)
            text = self.rng.choice(self._texts(wording.CORRECTIONS, wording.HELD_OUT_CORRECTIONS))
            page.insert(self.rng, text.format(s=f"{name} {said}") + "\n", "middle")
        return found

    def _other_values(self, name: str, relation: str) -> list[str]:
        entities = self.world.entities.values()
        values = {entity.facts[relation] for entity in entities if relation in entity.facts}
        return sorted(values - {self.world.entities[name].facts[relation]})

    def _plain(self, corrected: dict[tuple[str, str], tuple[str, _Page]]) -> list[PageQuestion]:
        found = []
        for asked in answerable_questions(self.rng, self.world, self.documents.values(), self.wordings):
            facts = list(zip(asked.gold, asked.path.split("-"), strict=True))
            pages = [self.where[name] for name in asked.gold]
            ranks = tuple(page.rank for page in pages)
            if asked.hops == 1 and facts[0] in corrected:
                value, page = corrected[facts[0]]
                again = single_hop(self.rng, *facts[0], value, self.wordings)
                found.append(PageQuestion("conflicting", again, (*ranks, page.rank)))
            elif not any(fact in corrected for fact in facts) and len(set(ranks)) == asked.hops:
                found.append(PageQuestion("two-hop" if asked.hops == 2 else "single", asked, ranks))
        return found

    def _leaning(self, leaning: Sequence[_Leaning]) -> list[PageQuestion]:
        found = []
        for entity, page, place, reference in leaning:
            asked = single_hop(self.rng, entity.name, self.relation, entity.facts[self.relation], self.wordings)
            gold = (page.rank, page.rank + 1)
            found.append(PageQuestion("leaning", asked, gold, place, len(leaning), reference))
        return found

    def _unanswerable(self) -> list[PageQuestion]:
        found = []
        for name in self.free:
            entity = self.world.entities[name]
            relation = self.rng.choice(OWN_RELATIONS.get(entity.kind, RELATIONS[entity.kind]))
            asked = single_hop(self.rng, name, relation, "", self.wordings)
            answer = wording.NO_ANSWER
            asked = asked._replace(answer=answer, gold=(), value=answer.removesuffix("."))
            found.append(PageQuestion("unanswerable", asked, ()))
        return found[:SPARE]


def _pronoun(entity: Entity) -> str:
    if entity.kind != "person":
        return "It"
    return "She" if entity.name.split(" ")[0] in names.FEMALE_NAMES else "He"


def _world(rng: random.Random, split: DataSplit, num_entities: int, leaning: int) -> World:
    """Draw a world that has at least `leaning` entities of the same kind."""
    while True:
        world = draw_world(rng, split, num_entities)
        kinds = [entity.kind for entity in world.entities.values()]
        if max(kinds.count(kind) for kind in RELATIONS) >= leaning:
            return world
