"""The ways to search for chunks."""

from __future__ import annotations

from typing import Literal, get_args

Search = Literal["vector", "text", "hybrid"]
SEARCHES: tuple[Search, ...] = get_args(Search)
