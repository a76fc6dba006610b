"""Why a passage is, or is not, read from stored KV."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Why = Literal["found", "never stored", "evicted", "another model", "differs", "method cannot"]


@dataclass(frozen=True)
class Reason:
    """Why a passage is, or is not, read from stored KV.

    passage: id of the passage; for text without an id, how it begins
    why:     "another model": its KV is of another model, recipe, system prompt or collection
    detail:  the tier of the KV, the method's reason, or both texts around the token that differs
    place:   number of the passage's first token that differs; -1: none
    """

    passage: str
    why: Why
    detail: str = ""
    place: int = -1
