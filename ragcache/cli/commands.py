"""The `ragcache` command."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from ragcache import plugins
from ragcache.cli.ask import ask, chat, why
from ragcache.cli.ingest import delete, ingest, list_documents, precompute
from ragcache.cli.keys import collections, keys
from ragcache.cli.maintain import backup, doctor, info, methods, pin, pull, reencode, reencrypt, restore, unpin
from ragcache.cli.serve import serve
from ragcache.cli.terminal import Command
from ragcache.plugins import Registry

# Ragcache's own commands by name, and those of plug-ins.
COMMANDS: Registry[Callable[..., None]] = Registry(
    plugins.COMMANDS,
    {
        "ingest": ingest,
        "precompute": precompute,
        "reencode": reencode,
        "ask": ask,
        "why": why,
        "chat": chat,
        "serve": serve,
        "list": list_documents,
        "delete": delete,
        "collections": collections,
        "keys": keys,
        "pin": pin,
        "unpin": unpin,
        "info": info,
        "doctor": doctor,
        "reencrypt": reencrypt,
        "backup": backup,
        "restore": restore,
        "methods": methods,
        "pull": pull,
    },
)


def build_app() -> typer.Typer:
    """Return the command line as a typer application."""
    app = typer.Typer(
        help="Retrieval-augmented generation that never reads the same passage twice.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_top)
    for name, function in COMMANDS.items():
        app.command(name, cls=Command)(function)
    return app


def _print_version(requested: bool) -> None:
    if requested:
        from ragcache import __version__

        print(__version__)
        raise typer.Exit


def _top(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Take the options given before the command."""


def main() -> None:
    """Run the `ragcache` command."""
    build_app()()
