"""The journal of a run: each figure is on disk before the next is measured, so that a killed run can be continued."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.environment import Environment
from ragcache.errors import ConfigError, translate_os_errors


def read_lines(path: Path) -> list[Any]:
    """Return the values of a file of JSON lines, without a last line that was cut short; [] if there is no file.

    Raises ConfigError naming the line that is not JSON.
    """
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    found = []
    for number, line in enumerate((line for line in lines if line.endswith("\n")), 1):
        try:
            found.append(json.loads(line))
        except ValueError as error:
            raise ConfigError(f"{path}, line {number}: not JSON ({error}); delete the line or the file") from error
    return found


def append_line(path: Path, value: Any) -> None:
    """Write a JSON line and flush it. Raises StoreFullError, StoreReadOnlyError."""
    with translate_os_errors(path), path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(value) + "\n")


class Runs:
    """The environments in which a journal's figures were measured, a line per run, in a file beside the journal."""

    def __init__(self, journal: Path) -> None:
        self.path = journal.with_suffix(".runs.jsonl")

    def add(self, environment: Environment) -> None:
        append_line(self.path, asdict(environment))

    def all(self) -> list[dict[str, Any]]:
        return read_lines(self.path)


class Journal:
    """Figures by key, each a JSON line; the first line holds the settings that all figures depend on.

    Raises ConfigError for a journal of other settings.
    """

    def __init__(self, path: Path, settings: Any, environment: Environment) -> None:
        self.path = path
        self.runs = Runs(path)
        self._environment = environment
        stated = json.loads(json.dumps(settings, default=str))
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = read_lines(path)
        if lines and lines[0] != stated:
            raise ConfigError(
                f"{path} holds figures of other settings ({lines[0]}); name another --journal, or delete it"
            )
        self.done: dict[str, Any] = {line["key"]: line["value"] for line in lines[1:]}
        with translate_os_errors(path), path.open("w", encoding="utf-8") as file:  # drops a torn last line
            file.writelines(json.dumps(line) + "\n" for line in [stated, *lines[1:]])
        if not self.done:
            self.runs.path.unlink(missing_ok=True)
        self.runs.add(environment)

    def add(self, key: str, value: Any) -> None:
        append_line(self.path, {"key": key, "value": value})
        self.done[key] = value

    def once(self, key: str, measure: Callable[[], Any]) -> Any:
        """Return the figure of this key, measured unless the journal has it."""
        if key not in self.done:
            self.add(key, measure())
        return self.done[key]

    def environment(self) -> Environment:
        """Return this run's environment, with the highest load of the journal's runs, and clean only if all were."""
        return worst_of(self._environment, self.runs.all())

    def remove(self) -> None:
        """Delete the files: the result is written, and the next run measures anew."""
        for path in (self.path, self.runs.path):
            path.unlink(missing_ok=True)


def worst_of(environment: Environment, runs: Sequence[Mapping[str, Any]]) -> Environment:
    """Return `environment` with the highest load of `runs`, and clean only if all runs were."""
    load = max([environment.load_1min, *(run["load_1min"] for run in runs)])
    return replace(environment, load_1min=load, clean=all([environment.clean, *(run["clean"] for run in runs)]))
