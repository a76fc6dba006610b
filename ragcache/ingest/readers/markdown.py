"""Markdown: the text as it stands; its first heading is the title, and YAML front matter becomes metadata."""

from __future__ import annotations

import math
import re
from base64 import b64encode
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import yaml

from ragcache.errors import ReaderError
from ragcache.ingest.document import Document
from ragcache.ingest.readers.plain import decode, read_bytes
from ragcache.ingest.text_blocks import first_heading

_FRONT_MATTER = re.compile(r"\A---[ \t]*\n(?P<lines>(?:.*\n)*?)(?:---|\.\.\.)[ \t]*(?:\n|\Z)")


def read_markdown(path: Path, document_id: str) -> Iterator[Document | ReaderError]:
    metadata, text = split_front_matter(decode(read_bytes(path), path))
    if not text.strip():
        raise ReaderError(path, "there is no text below its front matter")
    title = metadata.get("title")
    named = first_heading(text) if title is None or isinstance(title, dict | list) else str(title)
    yield Document(document_id, text, metadata, title=named, source=document_id)


def split_front_matter(text: str) -> tuple[dict[str, Any], str]:
    """Fields and the text below. A block in which nothing is a field is a thematic break, and stays."""
    match = _FRONT_MATTER.match(text)
    metadata = {} if match is None else parse_front_matter(match["lines"])
    return ({}, text) if match is None or not metadata else (metadata, text[match.end() :])


# Front matter: YAML, as JSON's types.
# Scalars are those of YAML 1.2: `no` and `on` are words, and 12:30 is no number. Dates stay strings, as they are
# written. What is no YAML is read line by line, "name: value", since authors write `title: C#: a guide`.


MAX_DEPTH = 32
MAX_CHARACTERS = 16 << 10  # of a longer block nothing is read: it is text
_FIELD = re.compile(r"(?P<name>[A-Za-z_][\w-]*):[ \t]+(?P<value>\S.*)")
_SCALARS = {
    "null": (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    "bool": (r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    "int": (r"[-+]?(?:0|[1-9][0-9]*)", list("-+0123456789")),
    "float": (r"[-+]?(?:\.[0-9]+|(?:0|[1-9][0-9]*)(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?", list("-+.0123456789")),
}


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012

    def fetch_alias(self) -> None:
        raise yaml.YAMLError("aliases are not read: a few lines of them stand for gigabytes")

    def fetch_flow_collection_start(self, kind: Any) -> None:
        if self.flow_level >= MAX_DEPTH:  # each level makes every further token slower
            raise yaml.YAMLError(f"nested deeper than {MAX_DEPTH}")
        super().fetch_flow_collection_start(kind)


for _name, (_pattern, _first) in _SCALARS.items():
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", re.compile(rf"(?:{_pattern})\Z"), _first)


def parse_front_matter(lines: str) -> dict[str, Any]:
    """The fields; none where nothing is one."""
    if len(lines) > MAX_CHARACTERS:
        return {}
    try:
        found = _parse(lines)
    except ValueError:
        fields = (_FIELD.fullmatch(line.rstrip()) for line in lines.splitlines())
        return {field["name"]: _scalar(field["value"]) for field in fields if field}
    return found if isinstance(found, dict) else {}


def _parse(text: str) -> Any:
    """Raises ValueError."""
    try:
        return _json(yaml.load(text, _Loader))
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(str(error)) from error


def _scalar(value: str) -> Any:
    try:
        found = _parse(value)
    except ValueError:
        found = {}
    return value.strip("\"'") if isinstance(found, dict) else found


def _json(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _json(item) for key, item in value.items()}
    if isinstance(value, set):  # its order is another in each process
        return sorted(map(str, value))
    if isinstance(value, list | tuple):
        return [_json(item) for item in value]
    if isinstance(value, bytes):
        return b64encode(value).decode()
    if value is None or isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return value.isoformat() if isinstance(value, date) else str(value)
