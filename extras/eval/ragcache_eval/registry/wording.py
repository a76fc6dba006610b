"""Every sentence and question of the registry.

In sentences `{v}` is the value. In questions `{n}` is the name or, in two-hop questions, a phrase for the bridge.
Wordings under `HELD_OUT_*` are paraphrases in words that the training wordings also use; only evaluation asks them.
"""

from __future__ import annotations

from typing import NamedTuple

PREDICATES: dict[str, tuple[str, ...]] = {
    "town": ("now lives in {v}", "has settled in {v}", "is living in {v}", "still resides in {v}"),
    "profession": ("works as a {v}", "serves as a {v}", "trained as a {v}", "is now a {v}"),
    "born": ("was born in {v}", "dates back to {v}", "was christened in {v}"),
    "club": ("belongs to {v}", "has joined {v}", "plays for {v}", "is in {v}"),
    "river": ("lies on {v}", "stands on {v}", "sits beside {v}", "is beside {v}"),
    "founded": ("was founded in {v}", "was started in {v}", "has existed since {v}"),
    "product": ("is known for {v}", "is famous for {v}", "makes very fine {v}", "sells very good {v}"),
    "weekday": ("always meets on {v}", "always gathers on {v}", "has met on {v}"),
    "mouth": ("flows into {v}", "empties into {v}", "ends in {v}"),
    "source": ("rises in {v}", "springs from {v}", "begins in {v}", "comes from {v}"),
}
"""Three words stand between a name and what tells its value from others (a river's or club's "the" is one of them):
the distance that the model's first layer looks back from the start."""

HELD_OUT_PREDICATES: dict[str, tuple[str, ...]] = {
    "town": ("still lives in {v}", "now resides in {v}"),
    "profession": ("is still a {v}", "now works as a {v}"),
    "born": ("dates from {v}", "has been christened in {v}"),
    "club": ("now belongs to {v}", "still plays for {v}"),
    "river": ("now lies on {v}", "stands beside {v}"),
    "founded": ("has been founded in {v}", "is started in {v}"),
    "product": ("is best known for {v}", "makes very good {v}"),
    "weekday": ("now meets on {v}", "still gathers on {v}"),
    "mouth": ("now flows into {v}", "still ends in {v}"),
    "source": ("still springs from {v}", "now rises in {v}"),
}
"""Wordings of held-out long passages, none of which training sees."""

REMARKS: tuple[str, ...] = (
    "The papers were checked last year.",
    "A copy of the papers is on file.",
    "The registry keeps a copy of the entry.",
    "Nothing else has been checked.",
    "The copy is complete.",
    "The papers have been on file for years.",
    "The registry checked the copy last year.",
    "Nothing else is in the papers.",
)
HELD_OUT_REMARKS: tuple[str, ...] = (
    "The copy was checked last year.",
    "The papers have been complete for years.",
    "A copy of the entry is on file.",
    "Nothing else is in the registry.",
)
"""Sentences about nothing, of which a page has many where what is said of a name stands far behind it."""

CORRECTIONS: tuple[str, ...] = ("Correction: {s}.", "Correction of the registry: {s}.")
HELD_OUT_CORRECTIONS: tuple[str, ...] = ("Correction of the entry: {s}.",)

NO_ANSWER = "The registry does not say."

MENTIONS: dict[str, tuple[str, ...]] = {
    "town": (
        "Its best-known residents are {v}.",
        "Among the people who live there are {v}.",
        "Residents include {v}.",
        "{v} live there.",
    ),
    "club": ("Its members include {v}.", "Among its members are {v}.", "The list of members names {v}."),
    "river": ("On its way it passes {v}.", "Towns on its banks include {v}.", "It runs past {v}."),
}

TITLES: dict[str, str] = {"town": "{n}, home of {v}", "club": "{n}, with {v}", "river": "{n}, the river of {v}"}

FILLERS: tuple[str, ...] = (
    "This entry was checked last year.",
    "The registry keeps a copy of the papers.",
    "Nothing else is on file.",
    "The entry has been complete for years.",
)

QUESTIONS: dict[str, tuple[str, ...]] = {
    "town": (
        "Where does {n} live?",
        "In which town does {n} live?",
        "Which town is the home of {n}?",
        "What is the home town of {n}?",
        "In what town is {n}'s house?",
        "Where is {n} at home?",
    ),
    "profession": (
        "What is {n}'s profession?",
        "What does {n} do for a living?",
        "What is the profession of {n}?",
        "What does {n} work as?",
        "What trade does {n} follow?",
        "As what is {n} employed?",
    ),
    "born": (
        "When was {n} born?",
        "In which year was {n} born?",
        "What is {n}'s year of birth?",
        "What year was {n} born in?",
        "What is the birth year of {n}?",
    ),
    "club": (
        "Which club does {n} belong to?",
        "What club is {n} a member of?",
        "Of which club is {n} a member?",
        "What is the club of {n}?",
        "Which club has {n} joined?",
    ),
    "river": (
        "Which river flows past {n}?",
        "On which river does {n} lie?",
        "What river is {n} on?",
        "Which river does {n} stand on?",
        "What is the name of the river at {n}?",
    ),
    "founded": (
        "When was {n} founded?",
        "In which year was {n} founded?",
        "What is the founding year of {n}?",
        "What year was {n} set up in?",
        "Since when has {n} existed?",
    ),
    "product": (
        "What is {n} known for?",
        "What is {n} famous for?",
        "What does {n} make?",
        "Which product is {n} known for?",
        "What is the best product of {n}?",
    ),
    "weekday": (
        "On which day does {n} meet?",
        "When does {n} meet?",
        "What day does {n} meet on?",
        "On what day of the week does {n} gather?",
        "When are the meetings of {n}?",
    ),
    "mouth": (
        "Where does {n} flow to?",
        "What does {n} flow into?",
        "Into what does {n} flow?",
        "Where does {n} end?",
        "Where is the mouth of {n}?",
    ),
    "source": (
        "Where does {n} rise?",
        "Where does {n} begin?",
        "Where is the source of {n}?",
        "In which hills does {n} rise?",
        "What hills does {n} come from?",
    ),
}

HELD_OUT_QUESTIONS: dict[str, tuple[str, ...]] = {
    "town": ("What town does {n} live in?", "In which town is {n} at home?"),
    "profession": ("Which profession does {n} follow?", "What does {n} do as a profession?"),
    "born": ("What year is the birth year of {n}?", "In what year was {n} born?"),
    "club": ("What club does {n} belong to?", "Which club is {n} a member of?"),
    "river": ("What river flows past {n}?", "Which river is {n} on?"),
    "founded": ("In what year was {n} founded?", "What year was {n} founded in?"),
    "product": ("Which product is {n} famous for?", "For what is {n} known?"),
    "weekday": ("What day of the week does {n} meet on?", "On which day are the meetings of {n}?"),
    "mouth": ("What does {n} end in?", "What is the mouth of {n}?"),
    "source": ("In what hills is the source of {n}?", "In which hills does {n} begin?"),
}

BRIDGES: dict[str, tuple[str, ...]] = {
    "town": (
        "the town where {n} lives",
        "the home town of {n}",
        "the town that is home to {n}",
        "{n}'s home town",
        "the town in which {n} lives",
    ),
    "club": (
        "the club that {n} belongs to",
        "{n}'s club",
        "the club of {n}",
        "the club that {n} has joined",
        "the club of which {n} is a member",
    ),
    "river": ("the river that flows past {n}", "the river at {n}", "the river on which {n} lies", "the river of {n}"),
}

HELD_OUT_BRIDGES: dict[str, tuple[str, ...]] = {
    "town": ("the town that {n} lives in", "the town where {n} is at home"),
    "club": ("the club to which {n} belongs", "the club that {n} is a member of"),
    "river": ("the river that {n} lies on", "the river on which {n} stands"),
}


ANSWERS: dict[str, str] = {
    "town": "now lives in {v}",
    "profession": "works as a {v}",
    "born": "was born in {v}",
    "club": "belongs to {v}",
    "river": "lies on {v}",
    "founded": "was founded in {v}",
    "product": "is known for {v}",
    "weekday": "always meets on {v}",
    "mouth": "flows into {v}",
    "source": "rises in {v}",
}
"""An answer is a sentence: it names the entity before the value, as passages do. So the question's side and the
passage's side of a match are one and the same computation, which a small model finds far sooner than two."""


class TwoHop(NamedTuple):
    """A path over two documents; the answer names the bridge on the way: "... lives in Kelbrook, which lies on ..."."""

    bridge: str
    relation: str


TWO_HOPS: tuple[TwoHop, ...] = (
    TwoHop("town", "river"),
    TwoHop("town", "founded"),
    TwoHop("town", "product"),
    TwoHop("club", "weekday"),
    TwoHop("club", "founded"),
    TwoHop("river", "mouth"),
    TwoHop("river", "source"),
)
