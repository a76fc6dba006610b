"""The commands collections and keys."""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ragcache.cli.flags import WAIT_S, Json, StoreOptions, Wait, open_for_care, option
from ragcache.cli.terminal import command, print_json, print_result, print_table, say
from ragcache.engine.keys import (
    LIMITS,
    SCOPES,
    Key,
    check_limit,
    digest_of,
    new_secret,
    read_key_file,
    with_key,
    without_key,
    write_key_file,
)
from ragcache.errors import ConfigError
from ragcache.store.collections import check_name


@command
def collections(
    store: StoreOptions,
    delete: Annotated[
        str | None, option("--delete", "Delete this collection, with its documents and their KV.")
    ] = None,
    wait: Wait = WAIT_S,
    as_json: Json = False,
) -> None:
    """List the collections of the store, with the number of their documents, or delete a collection."""
    with open_for_care(store, read_only=delete is None) as kb:
        deleted = [] if delete is None else kb.delete_collection(delete, timeout_s=wait)
        counts = {name: kb.collection(name, create=False).store.documents.count() for name in kb.collections()}
    if as_json:
        print_json({"collections": counts, "deleted": deleted})
        return
    if delete is not None:
        say(f"{delete}: {len(deleted)} documents deleted")
    print_table(["collection", ">documents"], list(counts.items()))


@command
def keys(
    action: Annotated[Literal["add", "list", "revoke"], typer.Argument(help="What to do.")],
    name: Annotated[str | None, typer.Argument(help="The key to add or to revoke.")] = None,
    file: Annotated[Path, option("--keys", "The key file.")] = Path("keys.toml"),
    scopes: Annotated[
        list[str] | None, option("--scope", f"{', '.join(SCOPES)}; may be repeated; ask and write if not given.")
    ] = None,
    reads: Annotated[
        list[str] | None, option("--read", "A collection that it reads; may be repeated; * for all of them.")
    ] = None,
    writes: Annotated[
        list[str] | None, option("--write", "A collection that it reads and changes; may be repeated; * for all.")
    ] = None,
    expires: Annotated[
        datetime | None, option("--expires", "The day on which it stops to open anything, in UTC.")
    ] = None,
    limits: Annotated[
        list[str] | None,
        option("--limit", f"A limit of its own, NAME=NUMBER, of {', '.join(LIMITS)}; may be repeated."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Add, list or revoke the API keys of a key file, which a server reads again when it changes.

    The secret of a new key is shown once; the file has its digest.
    """
    known = read_key_file(file) if file.exists() else []
    if action == "list":
        _list(known, as_json)
        return
    if name is None:
        raise ConfigError(f"say which key to {action}: ragcache keys {action} NAME")
    if action == "revoke":
        write_key_file(file, without_key(known, name))
        say(f"{name}: revoked")
        return
    wanted = frozenset(scopes or ("ask", "write"))
    if wanted - set(SCOPES):
        raise ConfigError(f"--scope {', '.join(sorted(wanted - set(SCOPES)))} is none of {', '.join(SCOPES)}")
    read = frozenset([*(reads or ()), *(writes or ())])
    if not read:
        raise ConfigError("say which collections the key sees: --read NAME, --write NAME, or * for all of them")
    for one in read - {"*"}:
        check_name(one)
    ends, secret = None if expires is None else expires.replace(tzinfo=UTC), new_secret()
    own = dict(_limit(one) for one in limits or ())
    made = Key(name, digest_of(secret.encode()), wanted, read, frozenset(writes or ()), own, ends)
    write_key_file(file, with_key(known, made))
    text = f"{name}: {secret}\nThis is shown once. Clients send it as Authorization: Bearer SECRET."
    print_result(as_json, {"name": name, "secret": secret}, text)


def _limit(given: str) -> tuple[str, float]:
    """Return the name and number of a limit. Raises ConfigError for a limit that no key can have."""
    name, _, number = given.partition("=")
    value: Any = number
    with suppress(ValueError):
        value = float(number)
    check_limit("--limit", name, value)
    return name, value


def _list(known: list[Key], as_json: bool) -> None:
    rows = [
        (
            key.id,
            " ".join(sorted(key.scopes)),
            " ".join(sorted(key.reads)),
            " ".join(sorted(key.writes)),
            "never" if key.expires is None else key.expires.isoformat(),
            " ".join(f"{name}={value:g}" for name, value in sorted(key.limits.items())),
        )
        for key in known
    ]
    names = ["key", "scopes", "reads", "writes", "expires", "limits"]
    if as_json:
        print_json({"keys": [dict(zip(names, row, strict=True)) for row in rows]})
    else:
        print_table(names, rows)
