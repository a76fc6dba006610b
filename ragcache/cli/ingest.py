"""The commands ingest, precompute, list and delete, and the selection of documents by id, path or source pattern."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ragcache.cli import flags, terminal
from ragcache.engine.options import MetadataFilter
from ragcache.errors import ConfigError, ReaderError

if TYPE_CHECKING:
    from ragcache import Document, IngestReport, PrecomputeReport, RagCache, RayConfig, Store
    from ragcache.ingest.report import Failure


Sources = Annotated[
    list[str] | None,
    flags.option("--source", "By source: a file, a folder with all in it, or a pattern with * and ?; may be repeated."),
]


def by_source(sources: Sequence[str] | None) -> dict[str, Any] | None:
    """Return a filter for documents of these sources, taken as written and as paths from here; None without sources."""
    return _any_of("source", (pattern for text in sources or () for pattern in _patterns(text)))


def all_of(*filters: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return a filter that requires all of the given filters; None if all are None or empty."""
    conditions = [condition for condition in filters if condition]
    return {"$and": conditions} if conditions else None


def document_ids(kb: Store, given: Iterable[str]) -> dict[str, str]:
    """Return the id that each name means, by name: the name itself, or the id of the file at this path.

    A name is a path if no document has it as its id, and a document has the file's id.
    """
    from ragcache.ingest.readers import file_id

    named = {}
    for name in given:
        file = file_id(name) if "\0" not in name else name
        stored = kb.document(name) is not None or kb.document(file) is None
        named[name] = name if stored else file
    return named


def _patterns(source: str) -> list[str]:
    if "\0" in source:
        return [_literal(source)]
    if os.path.lexists(source) or not _is_pattern(source):
        from ragcache.ingest.readers import file_id

        path = _literal(file_id(source))
        # The file; its records, whose source ends in a line number; the contents of the folder.
        return [_literal(source), path, f"{path}:*", f"{path.rstrip('/')}/*"]
    parts = Path(source).parts
    fixed = next(rank for rank, part in enumerate(parts) if _is_pattern(part))
    folder = _literal(os.path.realpath(Path(*parts[:fixed])))
    return [source, "/".join([folder.rstrip("/"), *parts[fixed:]])]


def _is_pattern(text: str) -> bool:
    return "*" in text or "?" in text


def _literal(text: str) -> str:
    """Return a pattern that matches only this text."""
    return "".join(f"[{character}]" if character in "*?[" else character for character in text)


def _any_of(field: str, patterns: Iterable[str]) -> dict[str, Any] | None:
    parts = [{field: {"$glob": pattern}} for pattern in dict.fromkeys(patterns)]
    return {"$or": parts} if parts else None


LOCAL_RAY = "local"
KvMode = Annotated[Literal["eager", "lazy"], flags.option("--kv", "Compute KV now (eager) or at the first use (lazy).")]


@terminal.command
def ingest(
    paths: Annotated[
        list[Path],
        typer.Argument(help="Files and folders: text, Markdown, HTML, PDF, JSON lines, code, office documents."),
    ],
    store: flags.StoreOptions,
    models: flags.EngineOptions,
    chunks: flags.ChunkOptions,
    reading: flags.ReadLimitOptions,
    collection: flags.Collection = None,
    kv: KvMode = "eager",
    sync: Annotated[
        bool,
        flags.option("--sync", "Delete documents whose files have vanished from the given paths, follow renamed ones."),
    ] = False,
    dry_run: Annotated[bool, flags.option("--dry-run", "Say what would be done, and change nothing.")] = False,
    ray: Annotated[
        str | None,
        flags.option(
            "--ray",
            "Read, embed and encode on a Ray cluster: HOST:PORT, auto (this machine's), or local (started for this).",
            metavar="ADDRESS",
        ),
    ] = None,
    ray_actors: Annotated[
        int | None,
        flags.option("--ray-actors", "With --ray: models loaded; one for every free CPU or GPU if not given."),
    ] = None,
    wait: flags.Wait = flags.WAIT_S,
    as_json: flags.Json = False,
) -> None:
    """Read, embed and encode documents into the store.

    Unchanged documents cost nothing, changed ones are replaced. Inputs that cannot be read are listed with the reason
    and the others go on; the exit status is 1 then. After an interruption, run it again: it goes on from there.
    """
    cluster = ray_config(ray, ray_actors)
    if cluster is not None and store.is_new and store.neighbours is None:
        # Neighbours are found when all documents are stored, which is too late for the cluster.
        store = replace(store, neighbours=0)
    with ExitStack() as held:
        tries = dry_run and store.is_new and store.remote is None
        if tries:  # a dry run needs a store to compare with: an empty one, which is removed again
            store = replace(store, store=Path(held.enter_context(TemporaryDirectory())))
        kb = held.enter_context(flags.open_with_models(store, models, chunks, reading, create=tries or not dry_run))
        if not as_json:
            terminal.say_note(kb.estimate_kv(paths))
        seen = kb if collection is None else kb.collection(collection, create=tries or not dry_run)
        with terminal.bars() as progress:
            report = seen.ingest(
                paths, kv=kv, sync=sync, dry_run=dry_run, ray=cluster,
                progress=progress, timeout_s=wait,
            )  # fmt: skip
    finish(report, as_json, named=sync or dry_run)


@terminal.command
def precompute(
    paths: Annotated[
        list[Path], typer.Argument(help="Files and folders, as for ingest; JSON lines: a passage a line.")
    ],
    store: flags.StoreOptions,
    models: flags.EngineOptions,
    chunks: flags.ChunkOptions,
    reading: flags.ReadLimitOptions,
    split: Annotated[
        bool, flags.option("--split", "Cut documents as ingest does; else each is one passage, as it is.")
    ] = False,
    collection: Annotated[str, flags.option("--collection", "A name for where the passages come from.")] = "",
    sync: Annotated[
        bool, flags.option("--sync", "Remove KV of what the collection had and the paths no longer hold.")
    ] = False,
    dry_run: Annotated[bool, flags.option("--dry-run", "Say how much is there, and change nothing.")] = False,
    as_json: flags.Json = False,
) -> None:
    """Compute the KV of passages that another program stores, so that it is found in any prompt that holds them.

    Nothing is embedded and no text is kept, only ids, titles and metadata for the sources of answers. What cannot be
    read is listed with the reason and the others go on; the exit status is 1 then, and --sync removes nothing.
    """
    with flags.open_with_models(store, models, chunks, reading, create=not dry_run) as kb:
        failed: list[Failure] = []
        cut = chunks if split else None
        found = _passages(paths, kb, cut, reading, failed)
        files = list(found) if sync else found
        report = kb.precompute(files, collection=collection, sync=sync and not failed, dry_run=dry_run)
    report.failed = [*failed, *report.failed]
    rate = f", {report.tokens / report.elapsed_s:,.0f} tokens/s" if report.tokens and report.elapsed_s else ""
    text = (
        f"{report.computed} passages of {report.tokens:,} tokens computed in "
        f"{terminal.seconds_text(report.elapsed_s)}{rate}"
        f"; {report.known} known, {len(report.forgotten)} forgotten, {len(report.failed)} failed\n{report.kv_text}"
    )
    terminal.print_result(as_json, {**vars(report), "failed": failures_to_json(report)}, text)
    _end(report.failed)


def _passages(
    paths: Sequence[Path],
    kb: RagCache,
    chunks: flags.ChunkOptions | None,
    reading: flags.ReadLimitOptions,
    failed: list[Failure],
) -> Iterator[Document]:
    """Yield the passages of files, read one after another. failed: receives the inputs that could not be read"""
    from ragcache import Document
    from ragcache.ingest.chunker import Chunker
    from ragcache.ingest.readers import find_files
    from ragcache.ingest.report import Failure
    from ragcache.ingest.sandbox import IsolatedReader

    files = find_files(paths)
    failed += [Failure(str(error.path), error) for error in files.failed]
    chunker = None if chunks is None else Chunker(kb.lm.tokenizer, chunks.config())
    reader = IsolatedReader(reading.config().reading)
    try:
        for record in (record for file in files.files for record in reader.read(file)):
            if isinstance(record, ReaderError):
                failed.append(Failure(str(record.path), record))
            elif chunker is None:
                yield replace(record, source=record.id)
            else:
                for rank, chunk in enumerate(chunker.split(record.text, record.places)):
                    metadata = {**record.metadata, **chunk.metadata}
                    yield Document(f"{record.id}#{rank}", chunk.text, metadata, record.title, record.id)
    finally:
        reader.close()


def ray_config(address: str | None, actors: int | None) -> RayConfig | None:
    """Return the configuration of Ray, or None without --ray. Raises ConfigError for --ray-actors without --ray."""
    if address is None:
        if actors is not None:
            raise ConfigError("--ray-actors needs --ray: say where they run")
        return None
    from ragcache import RayConfig

    return RayConfig(None if address == LOCAL_RAY else address, actors)


def finish(report: IngestReport, as_json: bool, *, named: bool = False) -> None:
    """End a command with its report. Raises Exit if an input failed. named: see `print_report`"""
    if as_json:
        terminal.print_json(report_to_json(report))
    else:
        print_report(report, named=named)
    _end(report.failed)


def _end(failed: Sequence[Failure]) -> None:
    """Print each failure. Raises Exit if there is any."""
    for failure in failed:
        terminal.say_error(failure.error)
    if failed:
        raise typer.Exit(terminal.FAILED)


def failures_to_json(report: IngestReport | PrecomputeReport) -> list[dict[str, str]]:
    return [
        {"source": failure.source, "error": type(failure.error).__name__, "reason": str(failure.error)}
        for failure in report.failed
    ]


def report_to_json(report: IngestReport) -> dict[str, Any]:
    return {
        **vars(report),
        "failed": failures_to_json(report),
        "skipped": [str(path) for path in report.skipped],
        "moved": [{"from": move.old, "to": move.new} for move in report.moved],
        "seconds": asdict(report.seconds),
    }


def print_report(report: IngestReport, *, named: bool = False) -> None:
    """Print the report. named: list moved and removed documents too, and in a dry run added and updated ones"""
    if report.dry_run:
        terminal.say("nothing was changed; a run would do this:")
    for id in [*report.added, *report.updated] if report.dry_run else []:
        terminal.say(f"{'add' if id in report.added else 'update'} {id}")
    for move in report.moved if named else []:
        terminal.say(f"move {move.old} -> {move.new}")
    for id in report.removed if named else []:
        terminal.say(f"remove {id}")
    counts = {"added": report.added, "updated": report.updated, "unchanged": report.unchanged}
    changed = {"moved": len(report.moved), "removed": len(report.removed)}
    found = {word: len(ids) for word, ids in counts.items()} | {word: n for word, n in changed.items() if n or named}
    terminal.say(", ".join(f"{count} {word}" for word, count in found.items()) + f", {len(report.failed)} failed")
    seconds = report.seconds.total_s
    rate = f", {report.tokens / seconds:,.0f} tokens/s" if report.tokens and seconds else ""
    terminal.say(
        f"{report.chunks} passages of {report.tokens:,} tokens in {terminal.seconds_text(seconds)}{rate}; "
        f"the model read {report.computed_tokens:,} tokens"
    )
    if not report.dry_run:
        terminal.say(report.kv_text)
    if report.skipped:
        kind = "files of kinds that cannot be read, dotted names, or links to folders,"
        terminal.say(f"{len(report.skipped)} {kind} were skipped, such as {report.skipped[0]}")


@terminal.command
def list_documents(
    store: flags.StoreOptions,
    collection: flags.Collection = None,
    filter: MetadataFilter = None,
    source: Sources = None,
    id: Annotated[
        list[str] | None,
        flags.option("--id", "Only these ids; * and ? stand for any text and one character; repeatable."),
    ] = None,
    limit: Annotated[int | None, flags.option("--limit", "At most this many.", min=0)] = None,
    offset: Annotated[int, flags.option("--offset", "Leave out the first ones.", min=0)] = 0,
    as_json: flags.Json = False,
) -> None:
    """List the documents in the store, by id."""
    with flags.open_for_care(store, read_only=True) as kb:
        where = all_of(filter, by_source(source), _any_of("document_id", id or ()))
        seen = kb if collection is None else kb.collection(collection, create=False)
        documents = seen.documents(where, limit=limit, offset=offset)
    if as_json:
        terminal.print_json({"documents": [{**asdict(document), "state": document.state} for document in documents]})
        return
    rows = [(d.id, d.title, d.num_chunks, d.num_tokens, d.state) for d in documents]
    terminal.print_table(["id", "title", ">passages", ">tokens", "state"], rows)


@terminal.command
def delete(
    store: flags.StoreOptions,
    ids: Annotated[
        list[str] | None, typer.Argument(help="Document ids, as `ragcache list` shows them, or files.", metavar="ID...")
    ] = None,
    collection: flags.Collection = None,
    source: Sources = None,
    wait: flags.Wait = flags.WAIT_S,
    as_json: flags.Json = False,
) -> None:
    """Delete documents: text, embeddings, index entries, and KV in every tier.

    Ids and sources that no document has are named, and the exit status is 1 then; the others are deleted.
    """
    if not ids and not source:
        raise ConfigError("say which documents to delete: their ids, or --source")
    with flags.open_for_care(store) as opened:
        kb = opened if collection is None else opened.collection(collection, create=False)
        named = document_ids(kb, ids or [])
        absent = [place for place in source or [] if not kb.documents(by_source([place]), limit=1)]
        deleted = kb.delete(named.values(), filter=by_source(source), timeout_s=wait)
    missing = [entry for entry, id in named.items() if id not in deleted] + absent
    terminal.print_result(as_json, {"deleted": deleted, "missing": missing}, f"{len(deleted)} deleted")
    for entry in missing:
        terminal.say_error(
            f"{entry}: no document has this {'source' if entry in absent else 'id'}; `ragcache list` shows them"
        )
    if missing:
        raise typer.Exit(terminal.FAILED)
