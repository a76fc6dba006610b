"""The cases of a suite's set, made of rows of a public set: a file of a directory, or the hub's by `datasets`."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from ragcache.errors import ConfigError
from ragcache_eval.case import Case
from ragcache_eval.public_sets import at_positions
from ragcache_eval.question_files import QuestionLine, read_entry
from ragcache_eval.suites.base import Cut, QuestionSet
from ragcache_eval.suites.rows import read_rows

CUT_TOKENS = 512
"""Tokens of a passage of a long text."""


def suite_cases(
    one: QuestionSet,
    cut: Cut,
    *,
    directory: Path | None = None,
    limit: int | None = None,
) -> list[Case]:
    """Return the set's questions in its own words, with its metric.

    cut:    cuts a long text into passages of about CUT_TOKENS tokens
    limit:  questions; None: all

    Raises ConfigError for missing data, with the download to make, and for rows of another form.
    """
    cases = [case for line in islice(_lines(one, cut, directory), limit) for case in at_positions(line, "")]
    if not cases:
        raise ConfigError(f"{one.name}: there is no question in it")
    return [one.ask(case) for case in cases]


def _lines(one: QuestionSet, cut: Cut, directory: Path | None) -> Iterator[QuestionLine]:
    """Yield rows of the set's own form, or of `lines`."""
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
