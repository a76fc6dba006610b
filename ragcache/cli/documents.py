"""ingest, list, delete."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ragcache.cli.command import FAILED, command
from ragcache.cli.opening import open_for_care, open_with_models
from ragcache.cli.options import (
    WAIT_S,
    ChunkOptions,
    FilterText,
    Json,
    ModelOptions,
    StoreOptions,
    Wait,
    json_object,
    option,
)
from ragcache.cli.output import on_terminal, print_json, print_table, say, say_error, say_note, seconds_text

if TYPE_CHECKING:
    from ragcache import IngestReport
    from ragcache.store.records import Document


@command
def ingest(
    paths: Annotated[list[Path], typer.Argument(help="Files and folders: text, Markdown, HTML, PDF, JSON lines.")],
    store: StoreOptions,
    models: ModelOptions,
    chunks: ChunkOptions,
    kv: Annotated[
        Literal["eager", "lazy", "hot"],
        option("--kv", "Compute KV now (eager), on first use (lazy), or keep that of passages in demand alone (hot)."),
    ] = "eager",
    hot_after: Annotated[
        int, option("--hot-after", "With --kv hot: a passage is hot at its so manieth retrieval.", min=1)
    ] = 2,
    wait: Wait = WAIT_S,
    as_json: Json = False,
) -> None:
    """Read, embed and encode documents into the store.

    Unchanged documents cost nothing, changed ones are replaced. Inputs that cannot be read are listed with the reason
    and the others go on; the exit status is 1 then. After an interruption, run it again: it goes on from there.
    """
    from ragcache.ingest.progress_bars import progress_bars

    with open_with_models(store, models, chunks, create=True) as kb:
        if not as_json:
            say_note(kb.estimate_kv(paths))
        with progress_bars() if on_terminal() else nullcontext() as bars:
            report = kb.ingest(paths, kv=kv, hot_after=hot_after, progress=bars, timeout_s=wait)
    if as_json:
        print_json(report_to_json(report))
    else:
        print_report(report)
    for failure in report.failed:
        say_error(failure.error)
    if report.failed:
        raise typer.Exit(FAILED)


def report_to_json(report: IngestReport) -> dict[str, Any]:
    return {
        "added": report.added,
        "updated": report.updated,
        "unchanged": report.unchanged,
        "failed": [
            {"source": failure.source, "error": type(failure.error).__name__, "reason": str(failure.error)}
            for failure in report.failed
        ],
        "skipped": [str(path) for path in report.skipped],
        "chunks": report.chunks,
        "tokens": report.tokens,
        "computed_tokens": report.computed_tokens,
        "reused_blocks": report.reused_blocks,
        "kv_bytes": report.kv_bytes,
        "seconds": asdict(report.seconds),
    }


def print_report(report: IngestReport) -> None:
    counts = {"added": report.added, "updated": report.updated, "unchanged": report.unchanged}
    say(", ".join(f"{len(ids)} {word}" for word, ids in counts.items()) + f", {len(report.failed)} failed")
    seconds = report.seconds.total_s
    rate = f", {report.tokens / seconds:,.0f} tokens/s" if report.tokens and seconds else ""
    say(
        f"{report.chunks} passages of {report.tokens:,} tokens in {seconds_text(seconds)}{rate}; "
        f"the model read {report.computed_tokens:,} tokens"
    )
    say(report.kv_text)
    if report.skipped:
        say(f"{len(report.skipped)} files of kinds that cannot be read were skipped, such as {report.skipped[0]}")


@command
def list_documents(
    store: StoreOptions,
    filter: FilterText = None,
    limit: Annotated[int | None, option("--limit", "At most this many.", min=0)] = None,
    offset: Annotated[int, option("--offset", "Leave out the first ones.", min=0)] = 0,
    as_json: Json = False,
) -> None:
    """List the documents in the store, by id."""
    with open_for_care(store, read_only=True) as kb:
        documents = kb.documents(json_object(filter), limit=limit, offset=offset)
    if as_json:
        print_json({"documents": [document_to_json(document) for document in documents]})
        return
    rows = [(d.id, d.title, d.num_chunks, d.num_tokens, d.state) for d in documents]
    print_table(["id", "title", ">passages", ">tokens", "state"], rows)


def document_to_json(document: Document) -> dict[str, Any]:
    return {**asdict(document), "state": document.state}


@command
def delete(
    ids: Annotated[list[str], typer.Argument(help="Document ids, as `ragcache list` shows them.", metavar="ID...")],
    store: StoreOptions,
    wait: Wait = WAIT_S,
    as_json: Json = False,
) -> None:
    """Delete documents: text, embeddings, index entries, and KV in every tier.

    Ids that no document has are named, and the exit status is 1 then; the others are deleted.
    """
    with open_for_care(store) as kb:
        deleted = kb.delete(ids, timeout_s=wait)
    missing = [id for id in dict.fromkeys(ids) if id not in deleted]
    if as_json:
        print_json({"deleted": deleted, "missing": missing})
    else:
        say(f"{len(deleted)} deleted")
    for id in missing:
        say_error(f"{id}: no document has this id; `ragcache list` shows them")
    if missing:
        raise typer.Exit(FAILED)
