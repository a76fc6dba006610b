"""Properties of a store: bound at first use, and held to from then on."""

from __future__ import annotations

import json

from sqlalchemy import (
    Connection,
    select,
)

from ragcache.errors import (
    EmbedderMismatchError,
    ModelMismatchError,
    StoreMismatchError,
)
from ragcache.store.schema import (
    properties,
)

# Which error says that a property does not agree; StoreMismatchError for names that are not here.
MISMATCHES: dict[str, type[StoreMismatchError]] = {
    "embedder": EmbedderMismatchError,
    "embedding_dim": EmbedderMismatchError,
    "embedder_probe": EmbedderMismatchError,
    "model": ModelMismatchError,
    "fingerprint": ModelMismatchError,
    "tokenizer": ModelMismatchError,
}

HELD = "held:"  # begins the names of properties that hold a handle


def read_properties(connection: Connection) -> dict[str, object]:
    """Return every property, `schema` included."""
    rows = connection.execute(select(properties.c.name, properties.c.value)).mappings()
    return {row["name"]: json.loads(row["value"]) for row in rows}


def held_handles(connection: Connection) -> set[str]:
    """Handles that are referenced though no chunk has them."""
    return {name.partition(":")[2] for name in read_properties(connection) if name.startswith(HELD)}


def refuse_other(bound: object, name: str, value: object, where: str) -> None:
    """Raises the mismatch error of `name` when `value` is not what is bound."""
    if bound != json.loads(json.dumps(value)):
        raise MISMATCHES.get(name, StoreMismatchError)(
            f"{where}: made with {name} {bound!r}, not {value!r}; use that one again, or make a new store"
        )
