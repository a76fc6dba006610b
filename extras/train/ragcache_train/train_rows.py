"""Training data: JSON lines, an object per line, with a "type"; packed with xz or gzip if the file's name says so.

    {"type": "qa", "passages": [TEXT or {"title": T, "text": TEXT}, ...], "question": Q, "answer": A}
    {"type": "qa", "passages": [...], "questions": [{"question": Q, "answer": A}, ...]}
    {"type": "qa", "passages": [...]}   distilled: the model asks and answers (`ragcache_train/own_answers.py`)
    {"type": "chat", "messages": [{"role": "system" | "user" | "assistant", "content": TEXT}, ...]}
    {"type": "summary", "text": TEXT, "summary": TEXT}
    {"type": "instruction", "instruction": TEXT, "input": TEXT, "output": TEXT}
    {"type": "text", "text": TEXT}

All but "text" may have a "system" text, "qa" may say `"shuffle": false` (its passages keep their order), "summary" may
have its own "instruction", and "id" and other fields are ignored. A line that cannot be used is named and left
out; a file without a usable line is an error.

For distillation rows may also come from a store (`store_rows`).
"""

from __future__ import annotations

import gzip
import json
import lzma
import os
import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ragcache.engine.options import StoreConfig
from ragcache.engine.store import Store
from ragcache.errors import ConfigError
from ragcache.ingest.document import headed

KINDS = ("qa", "chat", "summary", "instruction", "text")
SUMMARY_INSTRUCTION = "Summarize the text above."
MAX_LINE_BYTES = 16 << 20
_OPENERS: dict[str, Callable[..., Any]] = {".xz": lzma.open, ".gz": gzip.open}
NAMED = 5  # bad lines that an error message names


class Asked(NamedTuple):
    """A question and its answer; the answer is "" if the model is to write it."""

    question: str
    answer: str


class ChatMessage(NamedTuple):
    role: str
    content: str


@dataclass(frozen=True)
class DataRow:
    """A usable line.

    kind:     one of KINDS; where: file and line
    system:   text before everything, or None for the template's own
    passages: read separately or together: passages of "qa", the text of "summary"
    asked:    questions and answers: a single pair for "summary" and "instruction"; none if the model is to ask
    messages: of "chat": user and assistant in turn, the assistant last
    text:     of "text"
    shuffle:  whether the passages may change places
    """

    kind: str
    where: str
    system: str | None = None
    passages: tuple[str, ...] = ()
    asked: tuple[Asked, ...] = ()
    messages: tuple[ChatMessage, ...] = ()
    text: str = ""
    shuffle: bool = True


class BadLine(NamedTuple):
    """A line that cannot be used. where: file and line; reason: why not"""

    where: str
    reason: str

    def __str__(self) -> str:
        return f"{self.where}: {self.reason}"


def read_rows(
    paths: Sequence[str | os.PathLike[str]], *, unlabelled: bool = False
) -> tuple[list[DataRow], list[BadLine]]:
    """Return all usable lines of the files, in order, and the unusable lines.

    unlabelled: "qa" lines may lack answers, or questions and answers

    Raises ConfigError for a file that cannot be read, or has no usable line.
    """
    if not paths:
        raise ConfigError("no training data; give at least one file of JSON lines")
    rows: list[DataRow] = []
    bad: list[BadLine] = []
    for path in paths:
        found = list(_read_file(Path(path), unlabelled))
        usable = [row for row in found if isinstance(row, DataRow)]
        refused = [line for line in found if isinstance(line, BadLine)]
        if not usable:
            raise ConfigError(f"{path} has no usable line{_named(refused)}")
        rows += usable
        bad += refused
    return rows, bad


def _named(bad: Sequence[BadLine]) -> str:
    if not bad:
        return ": it is empty; see docs/training.md for the lines that it may hold"
    more = f" (and {len(bad) - NAMED} more)" if len(bad) > NAMED else ""
    return ": " + "; ".join(str(line) for line in bad[:NAMED]) + more


def _read_file(path: Path, unlabelled: bool) -> Iterator[DataRow | BadLine]:
    """Yield lines, unpacking on the way: at most a line, or MAX_LINE_BYTES of a line, is in memory."""
    number = 0
    try:
        with _OPENERS.get(path.suffix, open)(path, "rb") as file:
            while line := file.readline(MAX_LINE_BYTES):
                number, where = number + 1, f"{path}:{number + 1}"
                if len(line) == MAX_LINE_BYTES and not line.endswith(b"\n"):
                    while (more := file.readline(MAX_LINE_BYTES)) and not more.endswith(b"\n"):
                        pass
                    yield BadLine(where, f"it is longer than {MAX_LINE_BYTES >> 20} MiB")
                elif line.strip(b"\xef\xbb\xbf \t\r\n"):
                    yield parse_line(line, where, unlabelled)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror or error}); give a file of JSON lines") from error
    except (EOFError, lzma.LZMAError, zlib.error) as error:
        raise ConfigError(f"{path} is cut short or damaged behind line {number} ({error}); get it again") from error


class _LineError(ValueError):
    """Why a line cannot be used."""


def parse_line(line: bytes | str, where: str, unlabelled: bool = False) -> DataRow | BadLine:
    """Return a line as a DataRow, or the reason why it cannot be."""
    try:
        text = line.decode("utf-8-sig") if isinstance(line, bytes) else line
        fields = json.loads(text)
        if not isinstance(fields, dict):
            raise _LineError("it is not a JSON object")
        kind = fields.get("type")
        if kind not in _PARSERS:
            raise _LineError(f"its type is {kind!r}; it must be one of {', '.join(KINDS)}")
        return _qa(fields, where, unlabelled) if kind == "qa" else _PARSERS[kind](fields, where)
    except _LineError as error:
        return BadLine(where, str(error))
    except (ValueError, RecursionError) as error:
        return BadLine(where, f"it is not JSON in UTF-8 ({error})")


def _text(fields: dict[str, Any], name: str, *, of: str = "", may_lack: bool = False) -> str:
    value = fields.get(name)
    if may_lack and value is None:
        return ""
    if not isinstance(value, str) or not value.strip():
        raise _LineError(f"{of}{name!r} must be a string with text in it")
    return value


def _system(fields: dict[str, Any]) -> str | None:
    return _text(fields, "system") if fields.get("system") is not None else None


def _list(fields: dict[str, Any], name: str) -> list[Any]:
    value = fields.get(name)
    if not isinstance(value, list) or not value:
        raise _LineError(f"{name!r} must be a list with something in it")
    return value


def _qa(fields: dict[str, Any], where: str, unlabelled: bool = False) -> DataRow:
    passages = tuple(_passage(value, number) for number, value in enumerate(_list(fields, "passages"), start=1))
    shuffle = fields.get("shuffle", True)
    if not isinstance(shuffle, bool):
        raise _LineError("'shuffle' must be true or false")
    return DataRow("qa", where, _system(fields), passages, _asked(fields, unlabelled), shuffle=shuffle)


def _passage(value: Any, number: int) -> str:
    if isinstance(value, str):
        value = {"text": value}
    if not isinstance(value, dict):
        raise _LineError(f"passage {number} must be a string or an object with 'text'")
    text = _text(value, "text", of=f"passage {number}: ")
    return headed(str(value.get("title") or ""), text)


def _asked(fields: dict[str, Any], unlabelled: bool) -> tuple[Asked, ...]:
    if unlabelled and not any(fields.get(name) is not None for name in ("question", "questions", "answer")):
        return ()
    if "questions" not in fields:
        return (Asked(_text(fields, "question"), _text(fields, "answer", may_lack=unlabelled)),)
    found = []
    for number, value in enumerate(_list(fields, "questions"), start=1):
        if not isinstance(value, dict):
            raise _LineError(f"question {number} must be an object with 'question' and 'answer'")
        of = f"question {number}: "
        found.append(Asked(_text(value, "question", of=of), _text(value, "answer", of=of, may_lack=unlabelled)))
    return tuple(found)


def _chat(fields: dict[str, Any], where: str) -> DataRow:
    messages = [_message(value, number) for number, value in enumerate(_list(fields, "messages"), start=1)]
    system = _system(fields)
    if messages[0].role == "system":
        system = messages.pop(0).content
    wanted = ["user", "assistant"] * (len(messages) // 2)
    if not messages or [message.role for message in messages] != wanted:
        raise _LineError("'messages' must be user and assistant in turn, ending with the assistant")
    return DataRow("chat", where, system, messages=tuple(messages))


def _message(value: Any, number: int) -> ChatMessage:
    roles = ("system", "user", "assistant")
    if not isinstance(value, dict) or value.get("role") not in roles:
        raise _LineError(f"message {number} must be an object whose 'role' is one of {', '.join(roles)}")
    return ChatMessage(value["role"], _text(value, "content", of=f"message {number}: "))


def _summary(fields: dict[str, Any], where: str) -> DataRow:
    instruction = _text(fields, "instruction") if fields.get("instruction") is not None else SUMMARY_INSTRUCTION
    asked = Asked(instruction, _text(fields, "summary"))
    return DataRow("summary", where, _system(fields), (_text(fields, "text"),), (asked,), shuffle=False)


def _instruction(fields: dict[str, Any], where: str) -> DataRow:
    given = fields.get("input") or ""
    if not isinstance(given, str):
        raise _LineError("'input' must be a string")
    instruction = _text(fields, "instruction")
    whole = f"{instruction}\n\n{given}" if given.strip() else instruction
    return DataRow("instruction", where, _system(fields), asked=(Asked(whole, _text(fields, "output")),))


def _plain_text(fields: dict[str, Any], where: str) -> DataRow:
    return DataRow("text", where, text=_text(fields, "text"))


_PARSERS: dict[Any, Callable[[dict[str, Any], str], DataRow]] = {
    "qa": _qa,
    "chat": _chat,
    "summary": _summary,
    "instruction": _instruction,
    "text": _plain_text,
}


def store_rows(path: str | Path, *, rows: int, passages: int, seed: int, database: str | None = None) -> list[DataRow]:
    """Return `rows` rows of `passages` adjacent passages of the store, in their order, each from another first passage.

    database: SQLAlchemy URL of a store whose documents are elsewhere

    There are fewer rows, or passages in a row, if the store is small. Raises ConfigError for an empty store,
    StoreNotFoundError.
    """
    with Store.open(path, store=StoreConfig(database=database, read_only=True)) as library:
        texts = [chunk.text for document in library.documents() for chunk in library.chunks_of(document.id)]
    if not texts:
        raise ConfigError(f"{path}: the store is empty; ingest something first")
    passages = min(passages, len(texts))
    places = range(len(texts) - passages + 1)
    starts = random.Random(f"store/{seed}").sample(places, min(rows, len(places)))
    return [
        DataRow("qa", f"{path}: passage {start + 1}", passages=tuple(texts[start : start + passages]), shuffle=False)
        for start in starts
    ]
