"""Properties of a store: recorded at first use, and checked from then on."""

from __future__ import annotations

import json

from sqlalchemy import Connection, select

from ragcache import errors
from ragcache.store.schema import properties

# The error for a property that does not match; StoreMismatchError for other names.
MISMATCHES: dict[str, type[errors.StoreMismatchError]] = {
    "embedder": errors.EmbedderMismatchError,
    "embedding_dim": errors.EmbedderMismatchError,
    "embedder_probe": errors.EmbedderMismatchError,
    "model": errors.ModelMismatchError,
    "fingerprint": errors.ModelMismatchError,
    "tokenizer": errors.ModelMismatchError,
}

HELD = "held:"  # begins the name of a property by which a handle counts as referenced; the handle follows


def read_properties(connection: Connection) -> dict[str, object]:
    """Return every property, `schema` included."""
    rows = connection.execute(select(properties.c.name, properties.c.value)).mappings()
    return {row["name"]: json.loads(row["value"]) for row in rows}


def held_handles(connection: Connection) -> set[str]:
    """Return the handles that count as referenced though no chunk has them; see `DocumentStore.hold`."""
    return {name.partition(":")[2] for name in read_properties(connection) if name.startswith(HELD)}


def refuse_other(bound: object, name: str, value: object, where: str) -> None:
    """Raise the error of `name` in MISMATCHES if `value` differs from the bound value.

    where: the database's name in the error
    """
    if bound != json.loads(json.dumps(value)):
        raise MISMATCHES.get(name, errors.StoreMismatchError)(
            f"{where}: made with {name} {bound!r}, not {value!r}; use that one again, or make a new store"
        )
