"""The cases of one set of a suite, made of rows of a public set: a file of a directory, or the hub's by `datasets`."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import httpx

from ragcache.errors import ConfigError
from ragcache_eval.case import Case, CasePassage
from ragcache_eval.haystack import CountTokens
from ragcache_eval.sources import QuestionLine, at_positions, load_cases, read_entry, read_objects
from ragcache_eval.suites.base import Cut, Download, QuestionSet

PASSAGES = 8
CUT_TOKENS = 512
"""Passages of a generated context, and tokens of a passage of a long text."""


def suite_cases(
    one: QuestionSet,
    count_tokens: CountTokens,
    cut: Cut,
    *,
    directory: Path | None = None,
    limit: int | None = None,
    length: int = 4096,
) -> list[Case]:
    """The set's questions in its own words, with its metric.

    cut:    cuts a long text into passages of about CUT_TOKENS tokens
    limit:  questions; None: all, or as many as the paper takes
    length: tokens of a generated or filled context

    Raises ConfigError for missing data, saying what to download, and for rows of another form.
    """
    count = limit or one.questions
    if one.generated:
        source = one.generated.format(length=length, passage=max(64, length // PASSAGES))
        cases = load_cases(source, count_tokens, limit=count)
    elif one.filled:
        cases = filled_cases(list(_lines(one, cut, directory)), length, count_tokens, count)
    else:
        lines = islice(_lines(one, cut, directory), count)
        cases = [case for line in lines for case in at_positions(line, "")]
    if not cases:
        raise ConfigError(f"{one.name}: there is no question in it")
    return [one.ask(case) for case in cases]


def _lines(one: QuestionSet, cut: Cut, directory: Path | None) -> Iterator[QuestionLine]:
    """Rows of the set's own form, or of `lines`."""
    for row, where in read_rows(one, directory):
        try:
            if one.form is None or "documents" in row:
                yield read_entry(row, where)
                continue
            line = one.form(row, where, cut)
        except (KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{where}: no row of {one.name} ({error!r}); is it another set's file?") from error
        if line is not None:
            yield line


# RULER's two tasks over public questions (SQuAD, HotpotQA): a question's passages among others of the same set.


Pool = Mapping[CasePassage, Any]
"""Every passage, with the article that it belongs to; None where the set names none."""


def filled_cases(
    lines: Sequence[QuestionLine], length: int, count_tokens: CountTokens, limit: int | None = None, seed: int = 0
) -> list[Case]:
    """The first `limit` questions, each with as many passages as `length` tokens hold, in an order drawn by `seed`.

    A question keeps its own passages, whatever they take; then come those of the same `meta.article`, then any others.
    """
    pool = {_plain(passage): line.meta.get("article") for line in lines for passage in line.case.passages}
    size = cache(lambda passage: count_tokens(passage.rendered()))
    cases = []
    for line in lines[:limit]:
        rng = random.Random(f"ruler_qa/{seed}/{line.case.id}")
        chosen = list(line.case.passages)
        room = length - sum(size(_plain(passage)) for passage in chosen)
        for passage in _others(line, pool, rng):
            room -= size(passage)
            if room < 0:
                break
            chosen.append(passage._replace(is_gold=False))
        rng.shuffle(chosen)
        cases.append(replace(line.case, passages=tuple(chosen)))
    return cases


def _plain(passage: CasePassage) -> CasePassage:
    """The passage, whichever question it is gold for."""
    return passage._replace(is_gold=None)


def _others(line: QuestionLine, pool: Pool, rng: random.Random) -> Iterator[CasePassage]:
    """Passages that are not the question's own; near ones first, each kind in an order drawn anew."""
    own = {_plain(passage) for passage in line.case.passages}
    article = line.meta.get("article")
    others = [(passage, article is not None and where == article) for passage, where in pool.items()]
    for wanted in (True, False):
        some = [passage for passage, is_near in others if is_near is wanted and passage not in own]
        yield from rng.sample(some, len(some))


# Rows.


FOLDERS = ("", "dev", "data")
ENDINGS = (".jsonl", ".jsonl.gz", ".json", ".parquet")
UNREADABLE = (OSError, ValueError, RuntimeError, httpx.HTTPError)  # what `datasets` and the hub's client raise

Row = tuple[dict[str, Any], str]


def read_rows(one: QuestionSet, directory: Path | None) -> Iterator[Row]:
    """Rows with the place where each stands. A file of the directory comes before the hub.

    Raises ConfigError that says what to download where the set is in neither.
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
    """Raises ConfigError where the package is not installed or finds nothing."""
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
