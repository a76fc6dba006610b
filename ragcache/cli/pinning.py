"""pin, unpin."""

from __future__ import annotations

from typing import Annotated

import typer

from ragcache.cli.command import command
from ragcache.cli.naming import document_ids
from ragcache.cli.opening import open_for_care, open_with_models
from ragcache.cli.options import Json, ModelOptions, StoreOptions
from ragcache.cli.output import print_json, say

Ids = Annotated[
    list[str],
    typer.Argument(help="Ids of documents, as `ragcache list` shows them, files, or ids of passages.", metavar="ID..."),
]


@command
def pin(ids: Ids, store: StoreOptions, models: ModelOptions, as_json: Json = False) -> None:
    """Keep the KV of documents or passages whatever the tiers' budgets and --ttl: what is not there is computed.

    It holds until `ragcache unpin`, or until the document is deleted.
    """
    with open_with_models(store, models) as kb:
        handles = kb.pin(document_ids(kb, ids).values())
    if as_json:
        print_json({"pinned": handles})
    else:
        say(f"{len(handles)} blocks pinned")


@command
def unpin(ids: Ids, store: StoreOptions, as_json: Json = False) -> None:
    """Let the tiers give up the KV of these documents or passages again."""
    with open_for_care(store) as kb:
        handles = kb.unpin(document_ids(kb, ids).values())
    if as_json:
        print_json({"unpinned": handles})
    else:
        say(f"{len(handles)} blocks unpinned")
