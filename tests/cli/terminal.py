"""Run commands in this process, whatever the environment of the tests says."""

from __future__ import annotations

import os

from typer.testing import CliRunner, Result

from ragcache.cli.app import build_app

IDS = ["arno", "cats.md", "club", "dogs.txt"]


def invoke(*arguments: object, env: dict[str, str] | None = None, input: str | None = None) -> Result:
    cleared = {name: None for name in os.environ if name.startswith("RAGCACHE_")}
    return CliRunner().invoke(build_app(), [str(a) for a in arguments], env={**cleared, **(env or {})}, input=input)
