"""Readers of request logs: each takes an entry of a program's log and yields its requests."""

from __future__ import annotations

import ast
import gzip
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from ragcache.errors import ConfigError
from ragcache_plan import logs

MOST_LINE = 64 * 2**20
"""Longest line, and largest file that is one JSON value, in bytes."""
VLLM_PROMPT = re.compile(r"prompt: ('(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")")
VLLM_TIME = re.compile(r"\b(\d\d-\d\d) \d\d:\d\d:\d\d")


class Logged(NamedTuple):
    """A request.

    parts: its prompt: texts, token ids, or blocks of a trace, each an id and a number of tokens
    day:  in UTC, "day N" for a trace whose time begins at 0, or "unknown"
    kind: "question", "conversation", "tools", "prompt" or "trace"
    """

    parts: Sequence[str | int | tuple[int, int]]
    day: str
    kind: str


def read_log(path: Path, skipped: Counter[str]) -> Iterator[Logged]:
    """Yield a log's requests, a line at a time; of a directory, those of the RAGPulse traces in it.

    skipped: counts lines that are no request, by reason

    Raises ConfigError for a file that cannot be read, TraceError for a directory that has no traces of RAGPulse.
    """
    if path.is_dir():
        for request in logs.read_log(path):
            blocks = [(hash_id(part.hash), part.num_tokens) for part in request.parts]
            yield Logged(blocks, _day(request.at), "trace")
        return
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rb") as file:
            if file.read(64).lstrip().startswith(b"["):
                file.seek(0)
                yield from _read_array(path, file.read(MOST_LINE + 1), skipped)
                return
            file.seek(0)
            while line := file.readline(MOST_LINE):
                if not line.endswith(b"\n") and len(line) == MOST_LINE:
                    skipped["a line of more than 64 MiB"] += 1
                    while line and not line.endswith(b"\n"):
                        line = file.readline(MOST_LINE)
                elif line.strip():
                    yield from _read_line(line.decode("utf-8", "replace"), skipped)
    except OSError as error:
        raise ConfigError(f"{path}: the log cannot be read ({error}); name a file of requests") from error


def _read_array(path: Path, data: bytes, skipped: Counter[str]) -> Iterator[Logged]:
    if len(data) > MOST_LINE:
        raise ConfigError(f"{path}: a JSON list of more than 64 MiB; write one request a line, as `jq -c '.[]'` does")
    try:
        entries = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: begins as a JSON list and is none ({error}); export it again") from error
    for entry in entries:
        yield from _read_entry(entry, skipped)


def _read_line(line: str, skipped: Counter[str]) -> Iterator[Logged]:
    if not line.lstrip().startswith("{"):
        if (found := VLLM_PROMPT.search(line)) is not None:
            day = VLLM_TIME.search(line)
            yield Logged([ast.literal_eval(found[1])], day[1] if day else "unknown", "prompt")
        else:
            skipped["a line without a request"] += 1
        return
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        skipped["a line that is no whole JSON"] += 1
        return
    yield from _read_entry(entry, skipped)


def _read_entry(entry: Any, skipped: Counter[str]) -> Iterator[Logged]:
    """Yield the requests of an object, whichever program wrote it."""
    found = False
    for read in (read_open_webui, read_trace, read_openai):
        for one in read(entry) if isinstance(entry, Mapping) else ():
            found = True
            yield one
        if found:
            return
    skipped["an object without messages, prompt or hash_ids"] += 1


def read_openai(entry: Mapping[str, Any]) -> Iterator[Logged]:
    """Yield the request of OpenAI's JSON lines, batches included, or of LiteLLM's log."""
    body: Any = next(
        (entry[name] for name in ("body", "request", "kwargs") if isinstance(entry.get(name), Mapping)), entry
    )
    when = next((entry[name] for name in ("timestamp", "startTime", "created", "created_at") if name in entry), None)
    messages, prompt = _from_json(body.get("messages")), body.get("prompt", body.get("input"))
    if isinstance(messages, list) and messages:
        tools = body.get("tools")
        shown = [json.dumps(tools, sort_keys=True)] if tools else []
        yield Logged([*shown, *map(_text, messages)], _day(when), _kind(messages, bool(tools)))
    elif isinstance(prompt, str) and prompt:
        yield Logged([prompt], _day(when), "prompt")
    elif isinstance(prompt, list) and prompt and all(type(one) is int for one in prompt):
        yield Logged(prompt, _day(when), "prompt")


def read_open_webui(entry: Mapping[str, Any]) -> Iterator[Logged]:
    """Yield the requests of an exported conversation: one for each answer, over the messages before it."""
    chat = entry.get("chat")
    given = chat.get("messages") if isinstance(chat, Mapping) else None
    messages: list[Any] = given if isinstance(given, list) else []
    for rank, message in enumerate(messages):
        if rank and isinstance(message, Mapping) and message.get("role") == "assistant":
            when = message.get("timestamp", entry.get("created_at"))
            yield Logged([_text(one) for one in messages[:rank]], _day(when), _kind(messages[:rank], False))


def read_trace(entry: Mapping[str, Any]) -> Iterator[Logged]:
    """Yield the request of a trace, which has ids of blocks instead of text.

    Mooncake has a list of ids, and milliseconds. RAGPulse and `ragcache record` have lists by the component of the
    prompt, and seconds. An id of `ragcache record` has its tokens beside it; those of RAGPulse are in other files of
    its directory, so that each of its blocks has the prompt's mean here.
    """
    ids, when = entry.get("hash_ids"), entry.get("timestamp")
    rows = [ids] if isinstance(ids, list) else list(ids.values()) if isinstance(ids, Mapping) else []
    given = [one for row in rows for one in (row if isinstance(row, list) else [row])]
    whole = entry.get("input_length")
    stated = whole if isinstance(ids, Mapping) and isinstance(whole, int) else 0
    size = max(1, round(stated / len(given))) if stated > 0 and given else logs.MOONCAKE_BLOCK
    blocks = [
        (hash_id(one), tokens)
        for one, tokens in (pair if isinstance(pair, list) and len(pair) == 2 else (pair, size) for pair in given)
        if isinstance(one, int | str) and type(tokens) is int and 0 < tokens <= logs.LONGEST
    ]
    if blocks:
        yield Logged(blocks, _day(when, unit_s=0.001 if isinstance(ids, list) else 1.0), "trace")


def hash_id(given: int | str) -> int:
    return given if isinstance(given, int) else int.from_bytes(given.encode()[:32], "big")


def _from_json(given: Any) -> Any:
    """Return a field's value, which some programs write as JSON within JSON; None if that is damaged."""
    try:
        return json.loads(given) if isinstance(given, str) else given
    except (ValueError, RecursionError):
        return None


def _text(message: Any) -> str:
    content = message.get("content") if isinstance(message, Mapping) else message
    role = str(message.get("role", "")) if isinstance(message, Mapping) else ""
    parts = content if isinstance(content, list) else [content]
    texts = [str(one.get("text", "")) if isinstance(one, Mapping) else str(one or "") for one in parts]
    return "\n".join([role, *texts])


def _kind(messages: Sequence[Any], tools: bool) -> str:
    roles = [one.get("role") for one in messages if isinstance(one, Mapping)]
    if tools or "tool" in roles:
        return "tools"
    return "conversation" if "assistant" in roles else "question"


def _day(when: Any, *, unit_s: float | None = None) -> str:
    """Return the day of a time, a number or an ISO date; "unknown" if it is neither.

    unit_s: seconds in a number's unit; None: seconds, or milliseconds if seconds would be after the year 5000
    """
    try:
        seconds = float(when)
    except (ValueError, TypeError):
        seconds = None
    try:
        if seconds is None:
            return datetime.fromisoformat(when.replace("Z", "+00:00")).date().isoformat()
        seconds *= unit_s or (0.001 if seconds > 1e11 else 1.0)
        if seconds < 1e8:
            return f"day {int(seconds // 86400) + 1}"
        return datetime.fromtimestamp(seconds, UTC).date().isoformat()
    except (ValueError, TypeError, AttributeError, OverflowError, OSError):
        return "unknown"
