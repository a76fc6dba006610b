"""Every sentence and question of the registry, read from wording.toml.

In sentences `{v}` is the value. In questions `{n}` is the name or, in two-hop questions, a phrase for the bridge.
Wordings under `HELD_OUT_*` are paraphrases in words that the training wordings also use; only evaluation asks them.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, NamedTuple

_READ: dict[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def _table(name: str) -> dict[str, tuple[str, ...]]:
    return {relation: tuple(texts) for relation, texts in _READ[name].items()}


PREDICATES = _table("predicates")
"""Three words lie between a name and the word that tells its value from other values, counting a river's or club's
"the". The model's initial weights match at this distance (tools/mini/initial.py)."""

HELD_OUT_PREDICATES = _table("held_out_predicates")
"""Wordings of held-out long passages, none of which training sees."""

REMARKS: tuple[str, ...] = tuple(_READ["remarks"])
HELD_OUT_REMARKS: tuple[str, ...] = tuple(_READ["held_out_remarks"])
"""Sentences without content, which fill a page where a statement is far from the name that it is about."""

CORRECTIONS: tuple[str, ...] = tuple(_READ["corrections"])
HELD_OUT_CORRECTIONS: tuple[str, ...] = tuple(_READ["held_out_corrections"])
FILLERS: tuple[str, ...] = tuple(_READ["fillers"])
NO_ANSWER = "The registry does not say."

MENTIONS = _table("mentions")
TITLES: dict[str, str] = _READ["titles"]
QUESTIONS, HELD_OUT_QUESTIONS = _table("questions"), _table("held_out_questions")
BRIDGES, HELD_OUT_BRIDGES = _table("bridges"), _table("held_out_bridges")

ANSWERS: dict[str, str] = _READ["answers"]
"""An answer is a sentence that names the entity before the value, as passages do. So a single computation matches both
the question and the passage, which a small model learns far sooner than two computations."""


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
