"""Questions as JSON lines, a user's own or a public set's; plain or gzip."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ragcache.errors import ConfigError
from ragcache_eval.case import Case, CasePassage


@dataclass(frozen=True)
class QuestionLine:
    """A line of a question file: its case, and the set's notes about it."""

    case: Case
    meta: Mapping[str, Any]


def read_entries(path: Path) -> list[QuestionLine]:
    """Read a file's questions. Raises ConfigError naming the file or the line that is not a question, and why."""
    entries: list[QuestionLine] = []
    seen: dict[str, str] = {}
    for fields, where in read_objects(path):
        entry = read_entry(fields, where)
        if entry.case.id in seen:
            raise ConfigError(f"{where}: id {entry.case.id!r} stands in {seen[entry.case.id]} too; ids must differ")
        seen[entry.case.id] = where
        entries.append(entry)
    if not entries:
        raise ConfigError(f"{path}: there is no question in it")
    return entries


def read_objects(path: Path) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield each line's object and its location for messages. Raises ConfigError if a line is not an object."""
    try:
        opener = gzip.open if path.suffix == ".gz" else open
        with opener(path, "rt", encoding="utf-8-sig") as file:
            for number, line in enumerate(file, 1):
                where = f"{path.name}, line {number}"
                if line.strip():
                    yield _object(line, where), where
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error})") from error


def _object(line: str, where: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not JSON ({error})") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: not a JSON object")
    return value


def read_entry(fields: Mapping[str, Any], where: str) -> QuestionLine:
    """Return the question that a line's object states. Raises ConfigError naming `where` and the wrong field."""
    question = fields.get("question")
    if not isinstance(question, str) or not question.strip():
        raise ConfigError(f"{where}: there is no question; give it a text 'question'")
    meta = fields.get("meta") or {}
    if not isinstance(meta, dict):
        raise ConfigError(f"{where}: 'meta' is not an object")
    documents = fields.get("documents", fields.get("passages", []))
    if not isinstance(documents, list):
        raise ConfigError(f"{where}: 'documents' is not a list of passages")
    passages = tuple(_passage(document, where) for document in documents)
    name = str(fields.get("id") or where)
    return QuestionLine(Case(name, question.strip(), passages, _answers(fields, where), cell=_cell(meta)), meta)


def _passage(document: Any, where: str) -> CasePassage:
    fields = {"text": document} if isinstance(document, str) else document
    text = fields.get("text") if isinstance(fields, dict) else None
    if not isinstance(text, str) or not text.strip():
        raise ConfigError(f"{where}: a passage has no text; give each as a text or as an object with 'text'")
    is_gold = fields.get("is_gold")
    return CasePassage(text, str(fields.get("title") or ""), is_gold if isinstance(is_gold, bool) else None)


def _answers(fields: Mapping[str, Any], where: str) -> tuple[str, ...]:
    given = fields.get("answers", fields.get("answer", []))
    answers = [given] if isinstance(given, str) else given
    if not isinstance(answers, list) or not all(isinstance(answer, str) for answer in answers):
        raise ConfigError(f"{where}: 'answers' is not a list of texts")
    return tuple(answer for answer in answers if answer.strip())


def _cell(meta: Mapping[str, Any]) -> dict[str, str | int]:
    hops = meta.get("hops")
    return {"hops": hops} if isinstance(hops, int) else {}
