"""Run commands in this process, whatever the environment of the tests says."""

import os
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import typer.testing
from typer.testing import CliRunner, Result

from ragcache.cli.commands import build_app

NAMES = ["cats.md", "dogs.txt", "arno", "club"]  # of the documents, in the order of their ids

typer.testing._get_command = cache(typer.testing._get_command)  # the options of all commands take half a second to make
app = cache(build_app)


def invoke(*arguments: object, env: dict[str, str] | None = None, input: str | None = None) -> Result:
    cleared = {name: None for name in os.environ if name.startswith("RAGCACHE_")}
    return CliRunner().invoke(app(), [str(a) for a in arguments], env={**cleared, **(env or {})}, input=input)


def names(ids: Iterable[str]) -> list[str]:
    """Document ids, those of files without their folders."""
    return [Path(id).name for id in ids]
