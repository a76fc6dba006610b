"""Entities of the registry that refer to each other."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from ragcache_eval.registry import names
from ragcache_eval.registry.names import DataSplit, is_held_out

RELATIONS: dict[str, tuple[str, ...]] = {
    "person": ("town", "profession", "born", "club"),
    "town": ("river", "founded", "product"),
    "club": ("weekday", "founded"),
    "river": ("mouth", "source"),
}
SHARED_PART_SHARE = 0.1
NOT_PEOPLE = frozenset(("the", *names.TOWN_QUALIFIERS))


@dataclass(frozen=True)
class Entity:
    """An entry: `facts` maps a relation to its value, `mentions` are entities that its document names in passing."""

    kind: str
    name: str
    facts: dict[str, str]
    mentions: list[str] = field(default_factory=list)


class World:
    """Entities of a split; no two share a name.

    split: the split that every name in the world belongs to, with or without a document about it.
    namesakes: whether two people may share a first name or a surname.
    rare_share: share of names with a word that is not a single token.
    """

    def __init__(
        self, rng: random.Random, split: DataSplit, *, namesakes: bool = True, rare_share: float = names.RARE_NAME_SHARE
    ) -> None:
        self.rng = rng
        self.split = split
        self.entities: dict[str, Entity] = {}
        self.namesakes = namesakes
        self.rare_share = rare_share
        self._taken: set[str] = set()
        self._parts: set[str] = set()

    def add_river(self) -> Entity:
        name = self._fresh(lambda rng: names.draw_river_name(rng, self.rare_share))
        facts = {"mouth": "Lake " + self.rng.choice(names.LAKES), "source": f"the {self.rng.choice(names.HILLS)} Hills"}
        return self._add(Entity("river", name, facts))

    def add_town(self, river: Entity) -> Entity:
        name = self._fresh(lambda rng: names.draw_town_name(rng, self.rare_share))
        facts = {
            "river": river.name,
            "founded": str(self.rng.randint(1500, 1699)),
            "product": self.rng.choice(names.PRODUCTS),
        }
        river.mentions.append(name)
        return self._add(Entity("town", name, facts))

    def add_club(self) -> Entity:
        name = self._fresh(lambda rng: names.draw_club_name(rng, self.rare_share))
        facts = {"weekday": self.rng.choice(names.WEEKDAYS), "founded": str(self.rng.randint(1900, 1999))}
        return self._add(Entity("club", name, facts))

    def add_person(self, town: Entity, club: Entity) -> Entity:
        female = self.rng.random() < 0.5
        name = self._fresh(lambda rng: names.draw_person_name(rng, female, self.rare_share))
        facts = {
            "town": town.name,
            "profession": self.rng.choice(names.PROFESSIONS),
            "born": str(self.rng.randint(1900, 1999)),
            "club": club.name,
        }
        town.mentions.append(name)
        club.mentions.append(name)
        return self._add(Entity("person", name, facts))

    def add_stranger(self, entity: Entity) -> None:
        """Add a name without a document to the mentions of `entity`."""
        if entity.kind == "river":
            entity.mentions.append(self._fresh(lambda rng: names.draw_town_name(rng, self.rare_share)))
        else:
            female = self.rng.random() < 0.5
            entity.mentions.append(self._fresh(lambda rng: names.draw_person_name(rng, female, self.rare_share)))

    def _add(self, entity: Entity) -> Entity:
        self.entities[entity.name] = entity
        return entity

    def _fresh(self, draw: Callable[[random.Random], str]) -> str:
        while True:
            name = draw(self.rng)
            if self.namesakes and self.rng.random() < SHARED_PART_SHARE:
                name = self._echo(name)
            parts = {name.split(" ")[-1]} if name.split(" ")[0] in NOT_PEOPLE else set(name.split(" "))
            if not self.namesakes and parts & self._parts:
                continue
            if name not in self._taken and is_held_out(name) == (self.split is DataSplit.HELD_OUT):
                self._taken.add(name)
                self._parts |= parts
                return name

    def _echo(self, name: str) -> str:
        """Give a person the surname or first name of another, because similar names are hard to tell apart."""
        people = [other for other in self.entities.values() if other.kind == "person"]
        if not people or name.split(" ")[0] not in (*names.FEMALE_NAMES, *names.MALE_NAMES):
            return name
        first, surname = self.rng.choice(people).name.split(" ")
        return f"{first} {name.split(' ')[1]}" if self.rng.random() < 0.5 else f"{name.split(' ')[0]} {surname}"


def draw_world(
    rng: random.Random, split: DataSplit, num_entities: int, rare_share: float = names.RARE_NAME_SHARE
) -> World:
    """Draw about `num_entities` entities in neighbourhoods: a river, a town or two, their people and clubs."""
    world = World(rng, split, rare_share=rare_share)
    while len(world.entities) < num_entities:
        river = world.add_river()
        clubs = [world.add_club()]
        for _ in range(rng.randint(1, 2)):
            town = world.add_town(river)
            for _ in range(rng.randint(1, 3)):
                if rng.random() < 0.4:
                    clubs.append(world.add_club())
                world.add_person(town, rng.choice(clubs))
    for entity in world.entities.values():
        if entity.kind != "person":
            while rng.random() < 0.35 and len(entity.mentions) < 4:
                world.add_stranger(entity)
            rng.shuffle(entity.mentions)
    return world
