"""Rows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from ragcache.errors import ConfigError
from ragcache_eval.question_files import read_objects
from ragcache_eval.suites.base import Download, QuestionSet

FOLDERS = ("", "dev", "data")
ENDINGS = (".jsonl", ".jsonl.gz", ".json", ".parquet")
UNREADABLE = (OSError, ValueError, RuntimeError, httpx.HTTPError)  # what `datasets` and the hub's client raise

Row = tuple[dict[str, Any], str]


def read_rows(one: QuestionSet, directory: Path | None) -> Iterator[Row]:
    """Yield each row with its location. A file of the directory takes precedence over the hub.

    Raises ConfigError that names the download if neither has the set.
    """
    path = find_file(one, directory) if directory is not None else None
    if path is not None:
        yield from _from_file(path)
        return
    if one.download is None:
        raise _missing(one, directory, "it is on no hub in this form")
    try:
        rows = _load(one.download)
    except ConfigError as error:
        raise _missing(one, directory, str(error)) from error
    for number, row in enumerate(rows, 1):
        yield dict(row), f"{one.name}, row {number}"


def find_file(one: QuestionSet, directory: Path) -> Path | None:
    places = (directory / folder / f"{file}{ending}" for folder in FOLDERS for file in one.files for ending in ENDINGS)
    return next((path for path in places if path.is_file()), None)


def _from_file(path: Path) -> Iterator[Row]:
    if path.suffix == ".parquet":
        rows = _load(Download("parquet", data_files=str(path)))
    elif path.suffix == ".json":
        rows = _json_array(path)
    else:
        yield from read_objects(path)
        return
    for number, row in enumerate(rows, 1):
        yield dict(row), f"{path.name}, row {number}"


def _json_array(path: Path) -> list[dict[str, Any]]:
    try:
        rows = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: cannot be read as JSON ({error})") from error
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ConfigError(f"{path}: not a JSON array of objects")
    return rows


def _load(download: Download) -> Any:
    """Load from the hub. Raises ConfigError if the package is not installed or finds nothing."""
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ConfigError("public sets need the package datasets; pip install 'ragcache-kv[eval]'") from error
    options = {"split": download.split, "data_files": download.data_files, "revision": download.revision}
    try:
        return load_dataset(download.path, download.config, trust_remote_code=False, **options)
    except UNREADABLE as error:
        what = download.data_files or download.path
        raise ConfigError(f"{what} cannot be loaded ({_first_line(error)})") from error


def _missing(one: QuestionSet, directory: Path | None, why: str) -> ConfigError:
    names = " or ".join(f"{file}.jsonl" for file in one.files)
    looked = f"{directory} has no {names}, and " if directory is not None else ""
    return ConfigError(
        f"the questions of {one.name} are missing: {looked}{why}; get {one.by_hand}, put it in a directory as {names} "
        "(or .jsonl.gz, .json, .parquet), and name that with --data-dir"
    )


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no reason given'}"
