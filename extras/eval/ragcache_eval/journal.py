"""Results per question, as JSON lines: each is written to disk at once, and a rerun continues from there."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import IO, Any, NamedTuple, Self

from ragcache.errors import ConfigError, translate_os_errors

VERSION = 1


class Key(NamedTuple):
    """case: its id; digest: of its text, so that a changed case is measured again; method: MethodSpec.key."""

    case: str
    digest: str
    method: str


@dataclass(frozen=True)
class Score:
    """A method's score on a question. Scores whose input is missing (gold answers, full prefill) are None.

    accuracy, exact_match, f1: see metrics
    kl_first, kl_answer: KL(full prefill || method) in nats: at the answer's first token; mean along the reference
                         answer, given token by token
    top1_first, top1_answer: whether both choose the same first token; share of the reference's tokens that both choose
    same_answer:   whether the method wrote the same answer as full prefill
    kept_share:    tokens held after prefill / tokens of the prompt, mean over layers
    computed_share: tokens run for this question / tokens of the prompt, mean over layers
    encode_s:      seconds to make this question's blocks, which ingestion pays once per passage
    place_s, prefill_s, ttft_s: seconds to place the blocks, for the forward pass, and for both: from blocks in memory
                   to the first token
    skipped:       the reason why the question was not measured; "" if it was
    """

    case: str
    digest: str
    method: str
    cluster: str
    cell: dict[str, str | int]
    prediction: str = ""
    accuracy: bool | None = None
    exact_match: bool | None = None
    f1: float | None = None
    kl_first: float | None = None
    kl_answer: float | None = None
    top1_first: bool | None = None
    top1_answer: float | None = None
    same_answer: bool | None = None
    prompt_tokens: int = 0
    kept_share: float | None = None
    computed_share: float | None = None
    encode_s: float | None = None
    place_s: float | None = None
    prefill_s: float | None = None
    ttft_s: float | None = None
    skipped: str = ""

    @property
    def key(self) -> Key:
        return Key(self.case, self.digest, self.method)


class Ledger:
    """Scores by key, in memory."""

    def __init__(self) -> None:
        self.done: dict[Key, Score] = {}

    def add(self, score: Score) -> None:
        self.done[score.key] = score


class Journal(Ledger):
    """The file of a run. Opened again with the same settings, `done` holds the scores already measured.

    Raises ConfigError if the file belongs to other settings or is not a journal.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        super().__init__()
        self.path = path
        self._settings = json.loads(json.dumps({"version": VERSION, **settings}))
        with translate_os_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self.done = self._read()
            self._file: IO[bytes] = open(path, "ab")  # noqa: SIM115 - open as long as the journal
            if self._file.tell() == 0:
                self._write({"settings": self._settings})

    def add(self, score: Score) -> None:
        """Write the score to disk before returning. Raises StoreFullError, StoreReadOnlyError."""
        with translate_os_errors(self.path):
            self._write(asdict(score))
        super().add(score)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def _write(self, value: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(value).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def _read(self) -> dict[Key, Score]:
        if not self.path.exists():
            return {}
        data = self.path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) < len(data):  # the run was killed while it wrote a line
            os.truncate(self.path, len(whole))
        lines = whole.splitlines()
        if lines:
            self._check_settings(_parsed(lines[0], self.path, 1).get("settings"))
        scores = [_score(_parsed(line, self.path, n), self.path, n) for n, line in enumerate(lines[1:], 2)]
        return {score.key: score for score in scores}

    def _check_settings(self, found: Any) -> None:
        if not isinstance(found, dict):
            raise ConfigError(f"{self.path}: not a file of results; name another output")
        for name in {**found, **self._settings}:
            if found.get(name) != self._settings.get(name):
                raise ConfigError(
                    f"{self.path} was made with {name} {found.get(name)!r}, not {self._settings.get(name)!r}; use that "
                    "again, name another output, or delete the file"
                )


def _parsed(line: bytes, path: Path, number: int) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{path}, line {number}: not JSON ({error}); delete the line or the file") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path}, line {number}: not a JSON object; delete the line or the file")
    return value


def _score(found: Mapping[str, Any], path: Path, number: int) -> Score:
    try:
        return Score(**{name: found[name] for name in (f.name for f in fields(Score)) if name in found})
    except TypeError as error:
        raise ConfigError(f"{path}, line {number}: not a result ({error}); delete the line or the file") from error
