"""Logs of a service's requests: when each came, and the hash and length of each part of its prompt. No text.

Three formats are read, each as JSON lines, also compressed by gzip:

RAGPulse's, a directory: `0_trace.jsonl` has a request a line, five further files the length of each hash. As published
it has two weeks, one after the other, each with a clock that begins at 0: their requests are merged by time
    {"timestamp": "82", "input_length": 3112, "output_length": 192, "session_id": "...", "hash_ids":
     {"sys_prompt": [8302], "passages_ids": [7398, 7370], "history": [15200], "web_search": [], "user_input": [26923]}}
`ragcache record`'s, a file: the same lines, with the length beside each hash: {"sys_prompt": [["5f0c", 512]], ...}
Mooncake's, a file: `hash_ids` is a list of blocks of 512 tokens, the last shorter; `timestamp` is in milliseconds
    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 48]}
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ragcache.errors import TraceError

KINDS = {
    "sys_prompt": "system",
    "passages_ids": "passage",
    "history": "history",
    "web_search": "web",
    "user_input": "question",
}
"""Kinds of parts by their names in a log, in the order of the prompt."""
TABLES = ("1_sys_prompt", "2_passages", "3_history", "4_user_input", "5_web_search")
TRACE = "0_trace"
MOONCAKE_BLOCK = 512
LONGEST = 1 << 24  # most tokens of a part or an answer: a line with more is damaged


class Part(NamedTuple):
    """A part of a prompt. kind: "system", "passage", "history", "web", "question", or "block" in Mooncake's format"""

    kind: str
    hash: str
    num_tokens: int


@dataclass(frozen=True)
class LoggedRequest:
    """A request. at: seconds; parts: in the order of the prompt; session: "" if unknown"""

    at: float
    parts: tuple[Part, ...]
    output_tokens: int
    session: str = ""

    @property
    def num_tokens(self) -> int:
        return sum(part.num_tokens for part in self.parts)


def read_log(path: Path) -> Iterator[LoggedRequest]:
    """Yield the requests of a log, whichever format it has. Raises TraceError naming the file and line."""
    if not path.is_dir():
        return _requests(path, _Lengths())
    lengths = _Lengths()
    for name in TABLES:
        lengths.read(_file(path, name))
    return iter(sorted(_requests(_file(path, TRACE), lengths), key=lambda request: request.at))


def json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the number and the object of each line. Raises TraceError naming the line that is not an object."""
    opened = gzip.open if path.suffix == ".gz" else open
    number = 0
    try:
        with opened(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, _object(path, number, line)
    except (OSError, EOFError) as error:
        raise TraceError(path, f"cannot be read ({error})", number + 1 if number else None) from error


def _object(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise TraceError(path, f"not UTF-8 ({error.reason})", number) from error
    except (ValueError, RecursionError) as error:
        raise TraceError(path, f"not JSON ({error})", number) from error
    if not isinstance(fields, dict):
        raise TraceError(path, "not a JSON object", number)
    return fields


def _file(directory: Path, name: str) -> Path:
    """Return the file of this name in the directory, compressed or not. Raises TraceError if there is none."""
    found = next((file for end in ("", ".gz") if (file := directory / f"{name}.jsonl{end}").is_file()), None)
    if found is None:
        raise TraceError(directory, f"there is no {name}.jsonl or {name}.jsonl.gz in it; give a directory of RAGPulse")
    return found


@dataclass
class _Lengths:
    """Tokens by hash. tables: whether separate files state them; otherwise each line of a log does"""

    tables: bool = False
    known: dict[str, int] = field(default_factory=dict)

    def read(self, path: Path) -> None:
        self.tables = True
        for number, fields in json_lines(path):
            name = next((name for name in fields if name.endswith("_id")), None)
            if name is None:
                raise TraceError(path, "it has no hash: a field whose name ends in '_id'", number)
            self.set(path, number, str(fields[name]), _tokens(path, number, fields, "token_length"))

    def set(self, path: Path, number: int, hash: str, num_tokens: int) -> None:
        """Note a length. Raises TraceError if the hash had another length."""
        if self.known.setdefault(hash, num_tokens) != num_tokens:
            raise TraceError(path, f"hash {hash} has {num_tokens} tokens here, {self.known[hash]} before", number)

    def part(self, path: Path, number: int, kind: str, given: Any) -> Part:
        """Return the part of a line: a hash, or without tables a hash and a length. Raises TraceError."""
        if not self.tables:
            if not isinstance(given, list) or len(given) != 2:
                raise TraceError(path, f"{given!r} is not a hash and its length: [hash, tokens]", number)
            given, tokens = given
            self.set(path, number, str(given), _tokens(path, number, {"the length": tokens}, "the length"))
        if (length := self.known.get(str(given))) is None:
            raise TraceError(path, f"hash {given} has no length in the files beside it", number)
        return Part(kind, str(given), length)


def _requests(path: Path, lengths: _Lengths) -> Iterator[LoggedRequest]:
    before = float("-inf")
    for number, fields in json_lines(path):
        hashes = fields.get("hash_ids")
        try:
            at = float(fields["timestamp"]) / (1000 if isinstance(hashes, list) else 1)
        except (KeyError, TypeError, ValueError):
            at = float("nan")
        if not abs(at) < float("inf"):
            raise TraceError(path, f"'timestamp' is {fields.get('timestamp')!r}; it is a number", number)
        if at < before and not (lengths.tables and at == 0):
            raise TraceError(path, f"its time is {at:g} s, and {before:g} s in the line before; sort the lines", number)
        before = at
        if isinstance(hashes, list):
            parts = _blocks(path, number, hashes, _tokens(path, number, fields, "input_length"), lengths)
        elif isinstance(hashes, dict) and all(isinstance(given, list) for given in hashes.values()):
            parts = [
                lengths.part(path, number, kind, one) for name, kind in KINDS.items() for one in hashes.get(name, ())
            ]
        else:
            raise TraceError(path, "'hash_ids' is neither lists by kind nor a list", number)
        if not parts:
            raise TraceError(path, "its prompt has no parts", number)
        output = _tokens(path, number, fields, "output_length")
        yield LoggedRequest(at, tuple(parts), output, str(fields.get("session_id", "")))


def _blocks(path: Path, number: int, hashes: list[Any], num_tokens: int, lengths: _Lengths) -> list[Part]:
    """Return the blocks of a line of Mooncake's. Raises TraceError if there are too few or too many."""
    if len(hashes) != -(-num_tokens // MOONCAKE_BLOCK):
        raise TraceError(path, f"{len(hashes)} hashes for {num_tokens} tokens in blocks of {MOONCAKE_BLOCK}", number)
    parts = []
    for rank, given in enumerate(hashes):
        tokens = min(MOONCAKE_BLOCK, num_tokens - rank * MOONCAKE_BLOCK)
        lengths.set(path, number, str(given), tokens)
        parts.append(Part("block", str(given), tokens))
    return parts


def _tokens(path: Path, number: int, fields: dict[str, Any], name: str) -> int:
    found = fields.get(name)
    if type(found) is not int or not 1 <= found <= LONGEST:
        raise TraceError(path, f"{name!r} is {found!r}; it is a whole number from 1 to {LONGEST:,}", number)
    return found
